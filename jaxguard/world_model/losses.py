"""Losses of both training stages: dicts of unreduced ``[B, T]`` arrays, each with a mask of its own.

A sum over valid entries divided by their number is left to :func:`reduce`, so that a padded batch and an
unpadded one give the same value and gradient.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from jaxguard.config import ModelConfig, Stage1Config
from jaxguard.world_model import latents
from jaxguard.world_model.rollout import observe
from jaxguard.world_model.rssm import (
    RSSM,
    encode_instruction,
    encode_steps,
    prior_logits,
    read_risk,
    step_weights,
)


class Batch(NamedTuple):
    """Padded trajectories. ``obs`` has one entry more than ``act``: what the last action led to."""

    obs: jax.Array  # [B, T+1, E]
    act: jax.Array  # [B, T+1, E]; entry T is padding, so that one scan covers o_T
    ins: jax.Array  # [B, E]
    valid: jax.Array  # [B, T] float32 0/1: step exists
    target: jax.Array  # [B, T] float32 0/1: o_{t+1} is a new, known observation (stage 1)
    hazard: jax.Array  # [B, T] float32 targets (stage 2)
    prefix: jax.Array  # [B, T] float32 targets (stage 2)
    supervised: jax.Array  # [B, T] float32 0/1: up to and including the first hazard step (stage 2)


class Terms(NamedTuple):
    """Unreduced losses and where they count."""

    losses: dict[str, jax.Array]  # each [B, T]
    mask: jax.Array  # [B, T]


def centred_cosine(prediction: jax.Array, target: jax.Array, mask: jax.Array) -> jax.Array:
    """``1 - cos`` of batch-centred vectors (paper, eq. 5): ``[B, T, E]`` twice -> ``[B, T]``.

    Means are taken over the valid entries of the batch. A vector of (nearly) zero length has cosine 0 and
    gradient 0: the guarded square root keeps masked and constant entries free of NaN.
    """
    weight = mask[..., None]
    count = jnp.maximum(mask.sum(), 1.0)

    def centre(x: jax.Array) -> jax.Array:
        return (x - (x * weight).sum(axis=(0, 1)) / count) * weight

    p, o = centre(prediction), centre(target)
    dot = (p * o).sum(axis=-1)
    square = (p * p).sum(axis=-1) * (o * o).sum(axis=-1)
    usable = square > 1e-12
    return 1.0 - jnp.where(usable, dot / jnp.sqrt(jnp.where(usable, square, 1.0)), 0.0)


def world_model_losses(
    model: RSSM, config: ModelConfig, stage: Stage1Config, batch: Batch, key: jax.Array
) -> tuple[Terms, dict[str, jax.Array]]:
    """Stage 1 (paper, eq. 4-6): ``prior_pred``, ``post_pred``, ``dyn`` and ``rep``, and diagnostics ``[B, T]``.

    Entry t concerns the successor of step t: the observation that follows its action.
    """
    scan_key, prior_key = jax.random.split(key)
    w = step_weights(model, config)
    x = encode_steps(w, config, batch.obs, batch.act)
    h0 = encode_instruction(w, batch.ins).h0
    rollout = observe(w, config, h0, x, scan_key)
    h_next = rollout.h[:, 1:-1]  # h_1 .. h_T; the scan ran one step further for the posterior of o_T
    post = latents.log_probs(rollout.post_logits[:, 1:], config.unimix)
    prior = latents.log_probs(prior_logits(w, config, h_next), config.unimix)
    zhat = latents.sample(latents.noise(prior_key, prior.shape), prior)

    def predict(z: jax.Array) -> jax.Array:
        return model.predictor(jnp.concatenate([h_next, z.reshape(*z.shape[:2], -1)], axis=-1))

    target = batch.obs[:, 1:]
    stop = jax.lax.stop_gradient
    dyn, rep = latents.kl(stop(post), prior), latents.kl(post, stop(prior))
    losses = {
        "prior_pred": centred_cosine(predict(zhat), target, batch.target),
        "post_pred": centred_cosine(predict(rollout.z[:, 1:]), target, batch.target),
        "dyn": jnp.maximum(dyn, stage.free_nats),
        "rep": jnp.maximum(rep, stage.free_nats),
    }
    entropy = -(jnp.exp(post) * post).sum(axis=-1).mean(axis=-1)
    return Terms(losses, batch.target), {"kl": dyn, "post_entropy": entropy}


def stage1_scales(stage: Stage1Config) -> dict[str, float]:
    """Weight of each loss of :func:`world_model_losses`, keyed alike."""
    return {
        "prior_pred": stage.pred_scale,
        "post_pred": stage.pred_scale * stage.posterior_scale,
        "dyn": stage.kl_scale,
        "rep": stage.kl_scale,
    }


def risk_logits(model: RSSM, config: ModelConfig, batch: Batch, key: jax.Array | None) -> jax.Array:
    """Hazard and prefix logits ``[B, T, 2]``; ``key`` samples the latents, ``None`` takes their mode."""
    scan_key, prior_key = (None, None) if key is None else jax.random.split(key)
    w = step_weights(model, config)
    x = encode_steps(w, config, batch.obs[:, :-1], batch.act[:, :-1])
    instruction = encode_instruction(w, batch.ins)
    rollout = observe(w, config, instruction.h0, x, scan_key)
    if not config.successor:
        starts = rollout.h[:, :-1] if config.recurrent else jnp.broadcast_to(rollout.h[:, :1], rollout.h[:, 1:].shape)
        return read_risk(w, config, starts, rollout.z, x.heads_a, instruction.heads_e[:, None])
    h_next = rollout.h[:, 1:]
    logits = prior_logits(w, config, h_next)
    if prior_key is None:
        zhat = latents.mode(logits)
    else:
        zhat = latents.sample(latents.noise(prior_key, logits.shape), latents.log_probs(logits, config.unimix))
    return read_risk(w, config, h_next, zhat, x.heads_a, instruction.heads_e[:, None])


def risk_losses(
    model: RSSM, config: ModelConfig, batch: Batch, key: jax.Array | None, positive_weight: float = 1.0
) -> Terms:
    """Stage 2 (paper, eq. 8-10): binary cross-entropies ``hazard`` and ``prefix`` over the supervised prefix."""
    return risk_terms(risk_logits(model, config, batch, key), batch, positive_weight)


def risk_terms(logits: jax.Array, batch: Batch, positive_weight: float = 1.0) -> Terms:
    """Cross-entropies of hazard and prefix logits ``[B, T, 2]``, whatever model they are from."""

    def entropy(logit: jax.Array, target: jax.Array) -> jax.Array:
        return optax.sigmoid_binary_cross_entropy(logit, target) * (1.0 + (positive_weight - 1.0) * target)

    losses = {"hazard": entropy(logits[..., 0], batch.hazard), "prefix": entropy(logits[..., 1], batch.prefix)}
    return Terms(losses, batch.supervised)


def drop_inputs(batch: Batch, key: jax.Array, share: float) -> Batch:
    """Sets ``share`` of the entries of observations, actions and instructions to zero and scales the rest up."""
    keys = jax.random.split(key, 3)
    kept = [
        x * jax.random.bernoulli(k, 1.0 - share, x.shape) / (1.0 - share)
        for k, x in zip(keys, (batch.obs, batch.act, batch.ins), strict=True)
    ]
    return batch._replace(obs=kept[0], act=kept[1], ins=kept[2])


def reduce(terms: Terms, scales: dict[str, float]) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Weighted sum of masked means, and the means themselves."""
    count = jnp.maximum(terms.mask.sum(), 1.0)
    means = {name: (loss * terms.mask).sum() / count for name, loss in terms.losses.items()}
    return sum((scales[name] * mean for name, mean in means.items()), jnp.zeros(())), means
