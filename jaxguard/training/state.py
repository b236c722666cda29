"""Train state, the optimiser's partition, and the one jitted step of each stage."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jaxguard.config import Config
from jaxguard.world_model.losses import (
    Batch,
    drop_inputs,
    reduce,
    risk_logits,
    risk_losses,
    stage1_scales,
    world_model_losses,
)
from jaxguard.world_model.params import CORE, HEADS, POOLED, PREDICTOR, Params, build


class TrainState(NamedTuple):
    """Everything that a step changes: parameters, optimiser state, number of steps done."""

    params: Params
    opt_state: Any
    step: jax.Array


StepFunction = Callable[[TrainState, Any], tuple[TrainState, dict[str, jax.Array]]]
LossFunction = Callable[[Params, Any, jax.Array], tuple[jax.Array, dict[str, jax.Array]]]


def partition(stage: int, train_core: bool = False) -> Callable[[Params], dict[str, str]]:
    """Labels each module ``"full"``, ``"scaled"`` or ``"frozen"`` for the optimiser.

    Stage 1 trains the world model and leaves the heads alone; stage 2 trains the heads at the full rate,
    the world-model modules on the path to them at a scaled one, and keeps the GRU core (unless ``train_core``;
    and the observation predictor, which is not on that path) frozen. The pooled head is fitted by itself, afterwards.
    """
    frozen = POOLED + PREDICTOR if train_core else POOLED + CORE + PREDICTOR

    def label(params: Params) -> dict[str, str]:
        def of(name: str) -> str:
            if stage == 1:
                return "frozen" if name in HEADS + POOLED else "full"
            if name in HEADS:
                return "full"
            return "frozen" if name in frozen else "scaled"

        return {name: of(name) for name in params}

    return label


def partitioned(settings: Any, scaled: float, label: Callable[[Params], Any]) -> optax.GradientTransformation:
    """AdamW with gradient clipping at the rates that ``label`` names; frozen modules hold no optimiser state.

    Args:
        settings: Of a stage: learning rate, schedule, steps, clipping and weight decay.
        scaled: Factor on the learning rate of what is ``"scaled"``.
        label: ``params -> `` labels ``"full"``, ``"scaled"`` or ``"frozen"``, for whole modules.
    """

    def adam(scale: float) -> optax.GradientTransformation:
        rate = settings.learning_rate * scale
        schedule = optax.cosine_decay_schedule(rate, settings.steps) if settings.schedule == "cosine" else rate
        return optax.chain(
            optax.clip_by_global_norm(settings.clip_norm), optax.adamw(schedule, weight_decay=settings.weight_decay)
        )

    return optax.multi_transform({"full": adam(1.0), "scaled": adam(scaled), "frozen": optax.set_to_zero()}, label)


def optimiser(config: Config, stage: int) -> optax.GradientTransformation:
    """The optimiser of stage 1 or 2."""
    settings = config.stage1 if stage == 1 else config.stage2
    return partitioned(settings, config.stage2.world_model_scale, partition(stage, config.stage2.train_core))


def loss_function(config: Config, stage: int, sampled: bool = True) -> LossFunction:
    """``(params, batch, key) -> (loss, means)`` of a stage; ``sampled=False`` takes modes in stage 2, drops nothing."""
    model_config, settings = config.model, config.stage1 if stage == 1 else config.stage2

    def loss(params: Params, batch: Batch, key: jax.Array) -> tuple[jax.Array, dict[str, jax.Array]]:
        model = build(model_config, params)
        if sampled and settings.input_dropout:
            key, own = jax.random.split(key)
            batch = drop_inputs(batch, own, settings.input_dropout)
        if stage == 2:
            latent_key, positive = key if sampled else None, config.stage2.positive_weight
            terms = risk_losses(model, model_config, batch, latent_key, positive)
            return reduce(terms, dict(zip(("hazard", "prefix"), model_config.kept, strict=True)))
        terms, extra = world_model_losses(model, model_config, config.stage1, batch, key)
        total, means = reduce(terms, stage1_scales(config.stage1))
        weight = terms.mask / jnp.maximum(terms.mask.sum(), 1.0)
        return total, means | {name: (value * weight).sum() for name, value in extra.items()}

    return loss


def make_step(config: Config, stage: int) -> tuple[optax.GradientTransformation, StepFunction]:
    """The optimiser and the jitted step of stage 1 or 2; see :func:`step_function`."""
    transform, label = optimiser(config, stage), partition(stage, config.stage2.train_core)
    return transform, step_function(transform, loss_function(config, stage), config.train.seed * 2 + stage, label)


def step_function(
    transform: optax.GradientTransformation, loss: LossFunction, seed: int, label: Callable[[Params], Any]
) -> StepFunction:
    """The jitted step ``(state, batch) -> (state, metrics)``; the state is donated.

    Nothing is differentiated by what ``label`` calls frozen, and ``grad_norm`` is that of the rest.

    The step's random key is derived from the seed (of run and stage) and the number of steps done, so that a
    resumed run draws what an uninterrupted one would have drawn. A non-finite loss or gradient leaves
    parameters and optimiser state as they were; the caller sees it in the metrics and stops.
    """
    # The default generator compiles for 12 s per batch shape on a CPU, this one for 1 s.
    base = jax.random.key(seed, impl="rbg")

    def stopped(own: str, part: Any) -> Any:
        return jax.lax.stop_gradient(part) if own == "frozen" else part

    def trained(params: Params, batch: Any, key: jax.Array) -> tuple[jax.Array, dict[str, jax.Array]]:
        return loss(jax.tree.map(stopped, label(params), params), batch, key)

    def step(state: TrainState, batch: Any) -> tuple[TrainState, dict[str, jax.Array]]:
        key = jax.random.fold_in(base, state.step)
        (value, means), grads = jax.value_and_grad(trained, has_aux=True)(state.params, batch, key)
        norm = optax.tree.norm(grads)

        def update(params: Params, opt_state: Any) -> tuple[Params, Any]:
            updates, opt_state = transform.update(grads, opt_state, params)
            return optax.apply_updates(params, updates), opt_state

        finite = jnp.isfinite(value) & jnp.isfinite(norm)
        params, opt_state = jax.lax.cond(finite, update, lambda *same: same, state.params, state.opt_state)
        return TrainState(params, opt_state, state.step + 1), {"loss": value, "grad_norm": norm, **means}

    return jax.jit(step, donate_argnums=0)


def make_validation(config: Config, stage: int) -> Callable[[Params, Batch], tuple[jax.Array, ...]]:
    """Jitted ``(params, batch) -> (summed loss, weight, hazard logits [B, T])`` without sampling in stage 2.

    Stage 1 has no logits and returns zeros there; its latents are drawn with a fixed key.
    """
    loss = loss_function(config, stage, sampled=False)

    def validate(params: Params, batch: Batch) -> tuple[jax.Array, ...]:
        value, _ = loss(params, batch, jax.random.key(0))
        mask = batch.target if stage == 1 else batch.supervised
        if stage == 1:
            logits = jnp.zeros_like(batch.valid)
        else:
            logits = risk_logits(build(config.model, params), config.model, batch, None)[..., 0]
        return value * mask.sum(), mask.sum(), logits

    return jax.jit(validate)
