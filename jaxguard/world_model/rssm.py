"""The recurrent state-space model: modules, the one definition of a step, and its scan over trajectories.

Equations (paper, eq. 3; indices of the design)::

    h_0 = Init(e)
    post   z_t      ~ q(z | h_t, o_t)
    core   h_{t+1}  = GRU(h_t, LayerNorm([z_t, a_t]))
    prior  zhat_{t+1} ~ p(z | h_{t+1})
    feat   s = (h, z),  shat = (h, zhat)
    heads  hazard_t, prefix_t = MLP(shat_{t+1} + adapter, a_t, e);   o_hat_{t+1} = MLP(s_{t+1})

The hazard logit of scoring adds to the head's a linear function of what the run has shown so far
(:mod:`jaxguard.world_model.pooling`).

:func:`observe_step` is the only place where the recurrence is defined, :func:`read_risk` the only one where
risk is read off a state: training scans them, live sessions jit them, archives batch them. Both work on
:class:`StepWeights`, the parameters in the form a step consumes: the core's LayerNorm is folded into its
input product, the two heads are fused, and products with the same factor are one. That form is
differentiable, so training uses it as well.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from jaxguard.config import ModelConfig
from jaxguard.world_model import latents
from jaxguard.world_model.layers import EPSILON, MLP, Block, GRUCore, gru, matmul, normalise, value
from jaxguard.world_model.pooling import PooledWeights, pooled_size, pooled_weights


class RSSM(nnx.Module):
    """Parameters of the world model and the risk heads.

    Args:
        config: Sizes.
        rngs: Initialisation only; nothing random is stored in the module.
    """

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        width, flat = config.hidden, config.stoch * config.classes
        feat = config.deter + flat
        self.obs_encoder = Block(config.embed_dim, width, rngs=rngs)
        self.act_encoder = Block(config.act_dim, width, rngs=rngs)
        self.ins_encoder = Block(config.embed_dim, width, rngs=rngs)
        self.init = MLP(width, width, config.deter, rngs=rngs)
        self.posterior = MLP(config.deter + width, width, flat, rngs=rngs)
        self.core = GRUCore(flat, width, config.deter, rngs=rngs)
        self.prior = MLP(config.deter, width, flat, rngs=rngs)
        self.predictor = MLP(feat, width, config.embed_dim, rngs=rngs)
        self.adapter = MLP(feat, config.adapter_dim, feat, rngs=rngs)
        self.hazard_head = MLP(feat + 2 * width, width, 1, rngs=rngs)
        self.prefix_head = MLP(feat + 2 * width, width, 1, rngs=rngs)
        self.pooled_head = nnx.Linear(
            pooled_size(config.embed_dim, config.act_dim), 1, kernel_init=nnx.initializers.zeros, rngs=rngs
        )


class Norm(NamedTuple):
    """Scale and bias of a LayerNorm."""

    scale: jax.Array
    bias: jax.Array


class Dense(NamedTuple):
    """A :class:`~jaxguard.world_model.layers.Block` as arrays."""

    kernel: jax.Array
    bias: jax.Array
    norm: Norm

    def __call__(self, x: jax.Array) -> jax.Array:
        return jax.nn.silu(normalise(matmul(x, self.kernel) + self.bias, *self.norm))


class StepWeights(NamedTuple):
    """What encoding and a step read; see :func:`step_weights`. R is the adapter's width."""

    obs: Dense  # [E, H], encodes observations
    act: Dense  # [A, H], encodes actions
    ins: Dense  # [E, H], encodes instructions
    init: Dense  # [H, H], first layer of the initial state
    init_out: jax.Array  # [H, D]
    init_bias: jax.Array  # [D]
    post_o: jax.Array  # [H, H]
    post_o_bias: jax.Array  # [H]
    post_norm: Norm  # [H]
    post_out: jax.Array  # [H, S*C]
    post_bias: jax.Array  # [S*C]
    from_h: jax.Array  # [D, H + 3D], h_t's part of: posterior, core
    from_a: jax.Array  # [H, 3D + 2H], a_t's part of: core (scaled by its LayerNorm), heads
    core_z: jax.Array  # [S*C, 3D], scaled by the core's LayerNorm
    core_mean: jax.Array  # [3D], what one unit of the input's mean adds
    core_bias: jax.Array  # [3D]
    core_h_bias: jax.Array  # [3D]
    read_h: jax.Array  # [D, H + R + 2H], h_{t+1}'s part of: prior, adapter, heads (hazard, then prefix)
    read_z: jax.Array  # [S*C, R + 2H], zhat_{t+1}'s part of: adapter, heads
    prior_bias: jax.Array  # [H]
    prior_norm: Norm  # [H]
    prior_out: jax.Array  # [H, S*C]
    prior_out_bias: jax.Array  # [S*C]
    adapter_bias: jax.Array  # [R]
    adapter_norm: Norm  # [R]
    adapter_heads: jax.Array  # [R, 2H], the adapter's output layer times the heads' first layer
    heads_e: jax.Array  # [H, 2H]
    heads_bias: jax.Array  # [2H]
    heads_norm: Norm  # [2, H]
    heads_out: jax.Array  # [2, H]
    heads_out_bias: jax.Array  # [2]
    pooled: PooledWeights


_BLOCKS = ("obs", "act", "ins", "init")
_FACTORS = (
    *("init_out", "post_o", "post_out", "from_h", "from_a", "core_z"),
    *("read_h", "read_z", "prior_out", "adapter_heads", "heads_e"),
)


class StepInputs(NamedTuple):
    """Everything about steps that does not depend on the carry; leading axes ``[...]`` as given."""

    post_o: jax.Array  # [..., H] the observation's part of the posterior's first layer
    core_a: jax.Array  # [..., 3D] the action's part of the core's input product
    a_sum: jax.Array  # [...] sum of the encoded action
    a_dev: jax.Array  # [...] its sum of squared deviations
    heads_a: jax.Array  # [..., 2H]


class Instruction(NamedTuple):
    """Everything that an instruction fixes for its whole trajectory."""

    h0: jax.Array  # [B, D]
    heads_e: jax.Array  # [B, 2H]


def step_weights(model: RSSM, config: ModelConfig) -> StepWeights:
    """Brings the parameters into the form a step consumes; exact algebra, differentiable."""
    deter, flat = config.deter, config.stoch * config.classes
    feat = deter + flat
    post, prior, adapter = model.posterior, model.prior, model.adapter
    kernel = model.core.inputs.kernel[...]
    scaled = value(model.core.norm.scale)[:, None] * kernel
    adapter_kernel = adapter.block.linear.kernel[...]
    heads_kernel, heads_bias = _fused_heads(model)
    scale = config.adapter_scale
    return StepWeights(
        obs=dense(model.obs_encoder),
        act=dense(model.act_encoder),
        ins=dense(model.ins_encoder),
        init=dense(model.init.block),
        init_out=model.init.out.kernel[...],
        init_bias=_bias(model.init.out),
        post_o=post.block.linear.kernel[...][deter:],
        post_o_bias=_bias(post.block.linear),
        post_norm=_norm(post.block.norm),
        post_out=post.out.kernel[...],
        post_bias=_bias(post.out),
        from_h=_beside(post.block.linear.kernel[...][:deter], model.core.recurrent.kernel[...]),
        from_a=_beside(scaled[flat:], heads_kernel[feat : feat + config.hidden]),
        core_z=scaled[:flat],
        core_mean=scaled.sum(axis=0),
        core_bias=value(model.core.norm.bias) @ kernel + _bias(model.core.inputs),
        core_h_bias=_bias(model.core.recurrent),
        read_h=_beside(prior.block.linear.kernel[...], adapter_kernel[:deter], heads_kernel[:deter]),
        read_z=_beside(adapter_kernel[deter:], heads_kernel[deter:feat]),
        prior_bias=_bias(prior.block.linear),
        prior_norm=_norm(prior.block.norm),
        prior_out=prior.out.kernel[...],
        prior_out_bias=_bias(prior.out),
        adapter_bias=_bias(adapter.block.linear),
        adapter_norm=_norm(adapter.block.norm),
        adapter_heads=scale * (adapter.out.kernel[...] @ heads_kernel[:feat]),
        heads_e=heads_kernel[feat + config.hidden :],
        heads_bias=heads_bias + scale * (_bias(adapter.out) @ heads_kernel[:feat]),
        heads_norm=Norm(
            jnp.stack([value(model.hazard_head.block.norm.scale), value(model.prefix_head.block.norm.scale)]),
            jnp.stack([value(model.hazard_head.block.norm.bias), value(model.prefix_head.block.norm.bias)]),
        ),
        heads_out=jnp.stack([model.hazard_head.out.kernel[...], model.prefix_head.out.kernel[...]])[..., 0],
        heads_out_bias=jnp.concatenate([_bias(model.hazard_head.out), _bias(model.prefix_head.out)]),
        pooled=pooled_weights(model.pooled_head.kernel[...], _bias(model.pooled_head), config.embed_dim),
    )


def rounded(w: StepWeights, config: ModelConfig, dtype: jax.typing.DTypeLike) -> StepWeights:
    """The same weights with the factors of large products in ``dtype``; norms, biases and sums stay float32.

    So does the encoder of actions that have two vectors: with it, one step in a thousand of real ones would be decided
    otherwise, without it two in three thousand.
    """
    factors = {name: getattr(w, name).astype(dtype) for name in _FACTORS}
    blocks = {name: getattr(w, name) for name in _BLOCKS if not (name == "act" and config.grounded)}
    return w._replace(
        **factors, **{name: block._replace(kernel=block.kernel.astype(dtype)) for name, block in blocks.items()}
    )


def _fused_heads(model: RSSM) -> tuple[jax.Array, jax.Array]:
    """First layers of both heads side by side: ``[feat + 2H, 2H]`` and ``[2H]``."""
    hazard, prefix = model.hazard_head.block.linear, model.prefix_head.block.linear
    return _beside(hazard.kernel[...], prefix.kernel[...]), jnp.concatenate([_bias(hazard), _bias(prefix)])


def _beside(*kernels: jax.Array) -> jax.Array:
    """Kernels ``[N, ...]`` of one factor as one: small products bound a step, and one is faster than several."""
    return jnp.concatenate(kernels, axis=1)


def _norm(norm: nnx.LayerNorm) -> Norm:
    return Norm(value(norm.scale), value(norm.bias))


def dense(block: Block) -> Dense:
    """A block as arrays."""
    return Dense(block.linear.kernel[...], _bias(block.linear), _norm(block.norm))


def _bias(linear: nnx.Linear) -> jax.Array:
    return value(linear.bias)


def encode_observations(w: StepWeights, obs: jax.Array) -> jax.Array:
    """What a step reads of observations ``[..., E]``: their part of the posterior's first layer, ``[..., H]``."""
    return matmul(w.obs(obs), w.post_o) + w.post_o_bias


def encode_actions(w: StepWeights, act: jax.Array) -> jax.Array:
    """What a step reads of actions ``[..., A]``: ``[..., 3D + 2H + 2]``, taken apart by :func:`step_inputs`."""
    a = w.act(act)
    total = a.sum(axis=-1, keepdims=True)
    deviation = a - a.mean(axis=-1, keepdims=True)
    return jnp.concatenate([matmul(a, w.from_a), total, (deviation * deviation).sum(axis=-1, keepdims=True)], axis=-1)


def step_inputs(config: ModelConfig, observations: jax.Array, actions: jax.Array) -> StepInputs:
    """Puts :func:`encode_observations` and :func:`encode_actions` of the same steps together.

    A vector that is not finite makes the state NaN from its step on. Of an action it does so by itself; that of an
    observation would be lost in the latent's mode, where the largest of NaNs is a class like any other.
    """
    core = actions[..., : 3 * config.deter]
    return StepInputs(
        post_o=observations,
        core_a=jnp.where(jnp.isfinite(observations).all(axis=-1, keepdims=True), core, jnp.nan),
        a_sum=actions[..., -2],
        a_dev=actions[..., -1],
        heads_a=actions[..., 3 * config.deter : -2],
    )


def encode_steps(w: StepWeights, config: ModelConfig, obs: jax.Array, act: jax.Array) -> StepInputs:
    """Encodes observations ``[..., E]`` and actions ``[..., A]`` outside of the recurrence."""
    return step_inputs(config, encode_observations(w, obs), encode_actions(w, act))


def encode_instruction(w: StepWeights, ins: jax.Array) -> Instruction:
    """Initial state and the heads' instruction term for instructions ``[B, E]``."""
    e = w.ins(ins)
    return Instruction(h0=jnp.tanh(matmul(w.init(e), w.init_out) + w.init_bias), heads_e=matmul(e, w.heads_e))


def _logits(x: jax.Array, norm: Norm, kernel: jax.Array, bias: jax.Array, config: ModelConfig) -> jax.Array:
    out = matmul(jax.nn.silu(normalise(x, *norm)), kernel) + bias
    return out.reshape(*out.shape[:-1], config.stoch, config.classes)


def prior_logits(w: StepWeights, config: ModelConfig, h: jax.Array) -> jax.Array:
    """Logits of ``p(z | h)``: ``[..., D] -> [..., S, C]``."""
    return prior_from(w, config, matmul(h, w.read_h[:, : config.hidden]))


def prior_from(w: StepWeights, config: ModelConfig, from_h: jax.Array) -> jax.Array:
    """The same for a state whose product with the first ``hidden`` columns of ``read_h`` is known, ``[..., H]``."""
    return _logits(from_h + w.prior_bias, w.prior_norm, w.prior_out, w.prior_out_bias, config)


def observe_step(
    w: StepWeights, config: ModelConfig, h: jax.Array, x: StepInputs, gumbel: jax.Array | None = None
) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    """One step of the recurrence: infer ``z_t`` from ``o_t``, then move on with ``a_t``.

    Args:
        w: From :func:`step_weights`.
        config: Sizes (static).
        h: ``h_t`` ``[B, D]``.
        x: Inputs of step t, leading axis B.
        gumbel: Noise ``[B, S, C]`` that samples the latent; ``None`` takes its mode (scoring is deterministic).

    Returns:
        ``h_{t+1}`` ``[B, D]``, and of step t the posterior's logits ``[B, S, C]`` and the latent.
    """
    from_h = matmul(h, w.from_h)
    logits = _logits(from_h[..., : config.hidden] + x.post_o, w.post_norm, w.post_out, w.post_bias, config)
    if gumbel is None:
        z = latents.mode(logits)
    else:
        z = latents.sample(gumbel, latents.log_probs(logits, config.unimix))
    # LayerNorm of [z, a] without forming it: the moments of the two parts are combined (Chan et al.),
    # and the product with the kernel is linear in what the norm subtracts.
    flat, n_a = config.stoch * config.classes, config.hidden
    size = flat + n_a
    if jnp.issubdtype(z.dtype, jnp.integer):
        z_sum = jnp.asarray(float(config.stoch))
        z_dev = jnp.asarray(config.stoch - config.stoch**2 / flat)
    else:
        z_sum = z.sum(axis=(-2, -1))
        z_dev = ((z - z_sum[..., None, None] / flat) ** 2).sum(axis=(-2, -1))
    mean = (z_sum + x.a_sum) / size
    between = (z_sum / flat - x.a_sum / n_a) ** 2 * (flat * n_a / size)
    inverse = jax.lax.rsqrt((z_dev + x.a_dev + between) / size + EPSILON)
    products = latents.product(z, w.core_z) + x.core_a
    inputs = inverse[..., None] * (products - mean[..., None] * w.core_mean) + w.core_bias
    return gru(h, inputs, from_h[..., config.hidden :] + w.core_h_bias), (logits, z)


def read_risk(
    w: StepWeights, config: ModelConfig, h: jax.Array, zhat: jax.Array, heads_a: jax.Array, heads_e: jax.Array
) -> jax.Array:
    """Hazard and prefix logits of the predicted successor state.

    Args:
        w: From :func:`step_weights`.
        config: Sizes (static).
        h: ``h_{t+1}`` ``[..., D]``.
        zhat: Latent of the prior there, one-hot ``[..., S, C]`` or indices ``[..., S]``.
        heads_a: From :func:`encode_steps`, ``[..., 2H]``.
        heads_e: From :func:`encode_instruction`, broadcastable to ``[..., 2H]``.

    Returns:
        ``[..., 2]``: hazard logit, prefix logit.
    """
    return _risk(w, config, matmul(h, w.read_h[:, config.hidden :]), zhat, heads_a + heads_e)


def _risk(w: StepWeights, config: ModelConfig, from_h: jax.Array, zhat: jax.Array, given: jax.Array) -> jax.Array:
    state = from_h + latents.product(zhat, w.read_z)
    adapter = jax.nn.silu(normalise(state[..., : config.adapter_dim] + w.adapter_bias, *w.adapter_norm))
    x = state[..., config.adapter_dim :] + matmul(adapter, w.adapter_heads) + given + w.heads_bias
    x = x.reshape(*x.shape[:-1], 2, x.shape[-1] // 2)
    x = jax.nn.silu(normalise(x, *w.heads_norm))
    return (x * w.heads_out).sum(axis=-1) + w.heads_out_bias


def read_mode(
    w: StepWeights,
    config: ModelConfig,
    h: jax.Array,
    z: jax.Array | None,
    given: jax.Array,
    pooled: jax.Array,
) -> jax.Array:
    """How scoring reads risks ``[..., 2]`` (hazard, prefix): at ``h_{t+1}`` ``[..., D]``, with the mode of the prior.

    ``z`` takes the place of that mode where it is given (and ``h`` is ``h_t``). ``given`` ``[..., 2H]`` is the heads'
    action and instruction term, ``pooled`` ``[...]`` the pooled head's part of the hazard logit.
    """
    from_h = matmul(h, w.read_h)
    if z is None:
        z = latents.mode(prior_from(w, config, from_h[..., : config.hidden]))
    logits = _risk(w, config, from_h[..., config.hidden :], z, given)
    risks = jax.nn.sigmoid(logits + jnp.stack([pooled, jnp.zeros_like(pooled)], axis=-1))
    return risks if config.heads == "both" else risks * jnp.array(config.kept, risks.dtype)
