"""The twin's step in a form that exporters take: tensors in, tensors out."""

from __future__ import annotations

from torch import Tensor, nn

from bench.torch_twin.model import RSSM, State


class StepForExport(nn.Module):
    """``(h, e, obs, act) -> (h, risks)``, shapes as in :class:`bench.torch_twin.model.State`; no pooled head."""

    def __init__(self, model: RSSM):
        super().__init__()
        self.model = model

    def start(self, ins: Tensor) -> tuple[Tensor, Tensor]:
        """``h_0`` and the encoded instruction of instructions ``[B, E]``."""
        state = self.model.start(ins)
        return state.h, state.e

    def forward(self, h: Tensor, e: Tensor, obs: Tensor, act: Tensor) -> tuple[Tensor, Tensor]:
        # Without the pooled head the rest of the state is not looked at.
        state, risks = self.model(State(h, e, obs, obs, obs, obs), obs, act)
        return state.h, risks
