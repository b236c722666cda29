"""The recurrent world model: categorical latents, GRU core, heads and losses (Flax NNX).

Shape legend, used in every docstring: B batch, T step, E embedding, D deter (GRU state), S stoch (number of
categoricals), C classes, H hidden width. A *logit* is unbounded, a *risk* lies in [0, 1].
"""
