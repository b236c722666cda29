"""Losses of both training stages, as in :mod:`jaxguard.world_model.losses`, and a training step."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from bench.torch_twin.model import RSSM
from jaxguard.config import Config, Stage1Config
from jaxguard.training.state import partition
from jaxguard.world_model.losses import stage1_scales


class Batch(NamedTuple):
    """Padded trajectories, shapes as in :class:`jaxguard.world_model.losses.Batch`."""

    obs: Tensor
    act: Tensor
    ins: Tensor
    valid: Tensor
    target: Tensor
    hazard: Tensor
    prefix: Tensor
    supervised: Tensor


def log_probs(logits: Tensor, unimix: float) -> Tensor:
    """Log-probabilities with uniform mixing, ``[..., S, C]``."""
    return torch.log((1 - unimix) * logits.softmax(dim=-1) + unimix / logits.shape[-1])


def sample(gumbel: Tensor, logp: Tensor) -> Tensor:
    """Straight-through one-hot sample, flat: ``[..., S*C]``."""
    onehot = F.one_hot((logp + gumbel).argmax(dim=-1), logp.shape[-1]).to(logp.dtype)
    probs = logp.exp()
    return (onehot + probs - probs.detach()).flatten(-2)


def kl(logp: Tensor, logq: Tensor) -> Tensor:
    """``KL[p || q]`` summed over the categoricals."""
    return (logp.exp() * (logp - logq)).sum(dim=(-2, -1))


def centred_cosine(prediction: Tensor, target: Tensor, mask: Tensor) -> Tensor:
    """``1 - cos`` of batch-centred vectors; 1 where one of them has no length."""
    weight, count = mask[..., None], mask.sum().clamp(min=1)
    p, o = ((x - (x * weight).sum(dim=(0, 1)) / count) * weight for x in (prediction, target))
    dot = (p * o).sum(dim=-1)
    square = (p * p).sum(dim=-1) * (o * o).sum(dim=-1)
    usable = square > 1e-12
    return 1 - torch.where(usable, dot / torch.where(usable, square, 1.0).sqrt(), 0.0)


def rollout(model: RSSM, batch: Batch, steps: int, gumbel: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """``h_1 .. h_T`` ``[B, T, D]``, posterior logits, flat latents, encoded actions and instruction ``[B, H]``.

    ``gumbel`` is ``[T, B, S, C]``.
    """
    # What does not depend on the state is one product for all steps.
    o, a, e = (
        model.obs_encoder(batch.obs[:, :steps]),
        model.act_encoder(batch.act[:, :steps]),
        model.ins_encoder(batch.ins),
    )
    h = torch.tanh(model.init(e))
    hs, logits, zs = [], [], []
    for t in range(steps):
        logits.append(model.latent_logits(model.posterior(torch.cat([h, o[:, t]], dim=-1))))
        zs.append(sample(gumbel[t], log_probs(logits[-1], model.config.unimix)))
        h = model.core(h, torch.cat([zs[-1], a[:, t]], dim=-1))
        hs.append(h)
    return torch.stack(hs, 1), torch.stack(logits, 1), torch.stack(zs, 1), a, e


def world_model_losses(
    model: RSSM, stage: Stage1Config, batch: Batch, gumbel: Tensor, prior_gumbel: Tensor
) -> tuple[dict[str, Tensor], Tensor]:
    """Stage 1: unreduced losses ``[B, T]`` and their mask; noise ``[T+1, B, S, C]`` and ``[B, T, S, C]``."""
    h, post_logits, z, _, _ = rollout(model, batch, batch.obs.shape[1], gumbel)
    h_next = h[:, :-1]
    post = log_probs(post_logits[:, 1:], model.config.unimix)
    prior = log_probs(model.latent_logits(model.prior(h_next)), model.config.unimix)
    zhat, target = sample(prior_gumbel, prior), batch.obs[:, 1:]

    def predicted(latent: Tensor) -> Tensor:
        return centred_cosine(model.predictor(torch.cat([h_next, latent], dim=-1)), target, batch.target)

    losses = {
        "prior_pred": predicted(zhat),
        "post_pred": predicted(z[:, 1:]),
        "dyn": kl(post.detach(), prior).clamp(min=stage.free_nats),
        "rep": kl(post, prior.detach()).clamp(min=stage.free_nats),
    }
    return losses, batch.target


def risk_losses(model: RSSM, batch: Batch, gumbel: Tensor, prior_gumbel: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    """Stage 2: unreduced cross-entropies ``[B, T]`` and their mask; noise ``[T, B, S, C]`` and ``[B, T, S, C]``."""
    steps = batch.valid.shape[1]
    h, _, _, a, e = rollout(model, batch, steps, gumbel)
    zhat = sample(prior_gumbel, log_probs(model.latent_logits(model.prior(h)), model.config.unimix))
    logits = model.risk_logits(h, zhat, a, e[:, None].expand(-1, steps, -1))
    targets = {"hazard": batch.hazard, "prefix": batch.prefix}
    losses = {
        name: F.binary_cross_entropy_with_logits(logits[..., i], target, reduction="none")
        for i, (name, target) in enumerate(targets.items())
    }
    return losses, batch.supervised


def loss(model: RSSM, config: Config, stage: int, batch: Batch, gumbel: Tensor, prior_gumbel: Tensor) -> Tensor:
    """The scalar that a stage minimises."""
    if stage == 1:
        losses, mask = world_model_losses(model, config.stage1, batch, gumbel, prior_gumbel)
        scales = stage1_scales(config.stage1)
    else:
        losses, mask = risk_losses(model, batch, gumbel, prior_gumbel)
        scales = {"hazard": 1.0, "prefix": 1.0}
    count = mask.sum().clamp(min=1)
    return sum(scales[name] * (value * mask).sum() / count for name, value in losses.items())


def make_step(model: RSSM, config: Config, stage: int, compile: bool = False) -> Callable[[Batch], Tensor]:
    """A training step as the product's: partition, clipping, AdamW; draws its own noise; returns the loss.

    ``compile`` compiles the loss and its gradient; the loop over time is unrolled, so that takes a while.
    """
    settings = config.stage1 if stage == 1 else config.stage2
    # What the twin does not have.
    assert settings.schedule == "constant"
    assert not settings.input_dropout
    assert config.stage2.positive_weight == 1.0
    modules = dict(model.named_children())
    labels = partition(stage, config.stage2.train_core)(modules)
    scales = {"full": 1.0, "scaled": config.stage2.world_model_scale}
    for name, module in modules.items():
        module.requires_grad_(labels[name] in scales)
    groups = {
        label: [p for name, module in modules.items() if labels[name] == label for p in module.parameters()]
        for label in scales
    }
    optimisers = [
        torch.optim.AdamW(
            groups[label], lr=settings.learning_rate * scale, weight_decay=settings.weight_decay, fused=True
        )
        for label, scale in scales.items()
        if groups[label]
    ]

    value_of = torch.compile(loss) if compile else loss

    def gumbel(*leading: int) -> Tensor:
        shape = (*leading, model.config.stoch, model.config.classes)
        return -torch.empty(shape, device=model.init.out.weight.device).exponential_().log()

    def step(batch: Batch) -> Tensor:
        size, steps = batch.valid.shape
        value = value_of(model, config, stage, batch, gumbel(steps + (stage == 1), size), gumbel(size, steps))
        for optimiser in optimisers:
            optimiser.zero_grad(set_to_none=True)
        value.backward()
        for group in groups.values():
            torch.nn.utils.clip_grad_norm_([p for p in group if p.grad is not None], settings.clip_norm)
        for optimiser in optimisers:
            optimiser.step()
        return value.detach()

    return step
