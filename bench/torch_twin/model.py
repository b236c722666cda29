"""The recurrent state-space model of :mod:`jaxguard.world_model.rssm` as PyTorch modules.

Legend: B batch, E features, D ``deter``, S ``stoch``, C ``classes``, H ``hidden``.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from jaxguard.config import ModelConfig
from jaxguard.decision.evidence import FusionParams
from jaxguard.decision.policy import Cutoffs
from jaxguard.types import Decision


class Block(nn.Module):
    """Linear, LayerNorm, SiLU."""

    def __init__(self, n_in: int, n_out: int):
        super().__init__()
        self.linear = nn.Linear(n_in, n_out)
        self.norm = nn.LayerNorm(n_out)

    def forward(self, x: Tensor) -> Tensor:
        return F.silu(self.norm(self.linear(x)))


class MLP(nn.Module):
    """A :class:`Block` and an output layer."""

    def __init__(self, n_in: int, hidden: int, n_out: int):
        super().__init__()
        self.block = Block(n_in, hidden)
        self.out = nn.Linear(hidden, n_out)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.block(x))


class Core(nn.Module):
    """LayerNorm and GRU cell."""

    def __init__(self, n_in: int, deter: int):
        super().__init__()
        self.norm = nn.LayerNorm(n_in)
        self.gru = nn.GRUCell(n_in, deter)

    def forward(self, h: Tensor, x: Tensor) -> Tensor:
        return self.gru(self.norm(x), h)


class State(NamedTuple):
    """What a session carries: ``h`` ``[B, D]``, the encoded instruction ``[B, H]``, and for the pooled head the
    instruction ``[B, E]``, steps seen ``[B]``, sum and maximum of the vectors seen ``[B, 2E]``."""

    h: Tensor
    e: Tensor
    ins: Tensor
    steps: Tensor
    total: Tensor
    top: Tensor


class RSSM(nn.Module):
    """World model and risk heads; ``pooled`` says whether the pooled head takes part."""

    def __init__(self, config: ModelConfig, pooled: bool = False):
        super().__init__()
        self.config, self.pooled = config, pooled
        width, flat = config.hidden, config.stoch * config.classes
        feat = config.deter + flat
        self.obs_encoder = Block(config.embed_dim, width)
        self.act_encoder = Block(config.embed_dim, width)
        self.ins_encoder = Block(config.embed_dim, width)
        self.init = MLP(width, width, config.deter)
        self.posterior = MLP(config.deter + width, width, flat)
        self.core = Core(flat + width, config.deter)
        self.prior = MLP(config.deter, width, flat)
        self.predictor = MLP(feat, width, config.embed_dim)
        self.adapter = MLP(feat, config.adapter_dim, feat)
        self.hazard_head = MLP(feat + 2 * width, width, 1)
        self.prefix_head = MLP(feat + 2 * width, width, 1)
        self.pooled_head = nn.Linear(10 * config.embed_dim, 1)

    def latent_logits(self, flat: Tensor) -> Tensor:
        """``[..., S*C] -> [..., S, C]``."""
        return flat.unflatten(-1, (self.config.stoch, self.config.classes))

    def mode(self, logits: Tensor) -> Tensor:
        """One-hot of the most probable classes, flat: ``[..., S, C] -> [..., S*C]``."""
        return F.one_hot(logits.argmax(dim=-1), self.config.classes).to(logits.dtype).flatten(-2)

    def risk_logits(self, h: Tensor, zhat: Tensor, a: Tensor, e: Tensor) -> Tensor:
        """Hazard and prefix logits ``[..., 2]`` of the predicted successor state."""
        feat = torch.cat([h, zhat], dim=-1)
        feat = feat + self.config.adapter_scale * self.adapter(feat)
        x = torch.cat([feat, a, e], dim=-1)
        return torch.cat([self.hazard_head(x), self.prefix_head(x)], dim=-1)

    def start(self, ins: Tensor) -> State:
        """State before the first step of trajectories with instructions ``[B, E]``."""
        e = self.ins_encoder(ins)
        seen = ins.new_zeros(len(ins), 2 * ins.shape[1])
        return State(torch.tanh(self.init(e)), e, ins, ins.new_zeros(len(ins)), seen, seen - torch.inf)

    def forward(self, state: State, obs: Tensor, act: Tensor) -> tuple[State, Tensor]:
        """One step: observations and proposed actions ``[B, E]`` to the next state and risks ``[B, 2]``."""
        o, a = self.obs_encoder(obs), self.act_encoder(act)
        z = self.mode(self.latent_logits(self.posterior(torch.cat([state.h, o], dim=-1))))
        h = self.core(state.h, torch.cat([z, a], dim=-1))
        zhat = self.mode(self.latent_logits(self.prior(h)))
        logits = self.risk_logits(h, zhat, a, state.e)
        state = state._replace(h=h)
        if self.pooled:
            x = torch.cat([obs, act], dim=-1)
            state = state._replace(steps=state.steps + 1, total=state.total + x, top=torch.maximum(state.top, x))
            mean = state.total / state.steps[:, None]
            products = [obs * act, obs * state.ins, act * state.ins]
            seen = torch.cat([x, mean, state.top, *products, state.ins], dim=-1)
            logits = logits + F.pad(self.pooled_head(seen), (0, 1))
        return state, torch.sigmoid(logits)


class Decider(nn.Module):
    """Temporal evidence, fusion and thresholds for B sessions at once."""

    def __init__(self, fusion: FusionParams, cutoffs: Cutoffs):
        super().__init__()
        self.fusion, self.cutoffs = fusion, cutoffs

    def start(self, like: Tensor) -> tuple[Tensor, Tensor]:
        """``ema`` ``[B]`` and the last W prefix risks ``[B, W]`` (NaN where there was no step) before the first."""
        return torch.zeros_like(like), like.new_full((len(like), self.fusion.window), torch.nan)

    def forward(self, memory: tuple[Tensor, Tensor], risks: Tensor) -> tuple[tuple[Tensor, Tensor], Tensor, Tensor]:
        """Next memory, fused risks ``[B]`` and decisions ``[B]`` (values of :class:`Decision`)."""
        p, (hazard, prefix) = self.fusion, risks.unbind(-1)
        ema = p.beta * memory[0] + (1 - p.beta) * prefix
        recent = torch.cat([memory[1][:, 1:], prefix[:, None]], dim=1)
        parts = [p.w_hazard * hazard, p.w_ema * ema, p.w_win * recent.nanmean(dim=1)]
        fused = 1 - torch.stack([1 - part.clamp(0, 1) for part in parts]).prod(dim=0)
        if self.cutoffs.strict:
            blocks, holds = hazard > self.cutoffs.block, fused > self.cutoffs.hold
        else:
            blocks, holds = hazard >= self.cutoffs.block, fused >= self.cutoffs.hold
        finite = torch.isfinite(risks).all(dim=-1)
        held = torch.where(holds | ~finite, int(Decision.HOLD), int(Decision.PASS))
        return (ema, recent), fused, torch.where(blocks & finite, int(Decision.BLOCK), held)
