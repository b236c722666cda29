"""The twin's step with the algebra of the product: folded norms, fused heads, gathered rows, cached instruction.

A comparison of this module with :class:`bench.torch_twin.model.RSSM` shows what the formulas are worth, one with the
product what the framework is worth.
"""

from __future__ import annotations

import jax
import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from jaxguard.config import ModelConfig
from jaxguard.world_model.layers import EPSILON
from jaxguard.world_model.params import Params, build
from jaxguard.world_model.rssm import StepWeights, step_weights

State = tuple[Tensor, Tensor]
"""``h`` ``[1, D]`` and the heads' instruction term ``[1, 2H]``."""


class FoldedStep(nn.Module):
    """One step for one session; without the pooled head."""

    def __init__(self, config: ModelConfig, params: Params):
        super().__init__()
        self.config = config
        found: StepWeights = jax.device_get(jax.jit(lambda p: step_weights(build(config, p), config))(params))
        for name, value in found._asdict().items():
            for i, leaf in enumerate(jax.tree.leaves(value)):
                # Rows are gathered from the latents' matrices; the others are stored [out, in], as torch has them.
                keep = np.ndim(leaf) < 2 or name in ("core_z", "read_z", "heads_out", "heads_norm")
                tensor = torch.tensor(np.asarray(leaf) if keep else np.ascontiguousarray(np.asarray(leaf).T))
                self.register_buffer(f"{name}_{i}", tensor)
        self.register_buffer("first_rows", torch.arange(config.stoch) * config.classes)

    def dense(self, name: str, x: Tensor) -> Tensor:
        """An encoder: linear, norm, SiLU."""
        weight, bias, scale, shift = (getattr(self, f"{name}_{i}") for i in range(4))
        return F.silu(F.layer_norm(F.linear(x, weight, bias), scale.shape, scale, shift, EPSILON))

    def normed(self, x: Tensor, name: str) -> Tensor:
        scale, shift = getattr(self, f"{name}_0"), getattr(self, f"{name}_1")
        return F.silu(F.layer_norm(x, x.shape[-1:], None, None, EPSILON) * scale + shift)

    def rows(self, logits: Tensor, kernel: Tensor) -> Tensor:
        """The product of the mode's one-hot vector with a kernel: a sum of S rows, ``[1, N]``."""
        index = logits.view(self.config.stoch, self.config.classes).argmax(dim=-1) + self.first_rows
        return kernel[index].sum(dim=0, keepdim=True)

    def start(self, ins: Tensor) -> State:
        """``h_0`` ``[1, D]`` and the heads' instruction term ``[1, 2H]`` of an instruction ``[1, E]``."""
        e = self.dense("ins", ins)
        h = torch.tanh(F.linear(self.dense("init", e), self.init_out_0, self.init_bias_0))
        return h, F.linear(e, self.heads_e_0)

    def forward(self, state: State, obs: Tensor, act: Tensor) -> tuple[State, Tensor]:
        """The state after a step, and risks ``[1, 2]``."""
        c, (h, given) = self.config, state
        width, flat = c.hidden, c.stoch * c.classes
        a = self.dense("act", act)
        from_a, from_h = F.linear(a, self.from_a_0), F.linear(h, self.from_h_0)
        post = F.linear(self.dense("obs", obs), self.post_o_0, self.post_o_bias_0) + from_h[:, :width]
        logits = F.linear(self.normed(post, "post_norm"), self.post_out_0, self.post_bias_0)
        size = flat + width
        mean = (c.stoch + a.sum()) / size
        variance = (c.stoch + (a * a).sum()) / size - mean * mean
        products = self.rows(logits, self.core_z_0) + from_a[:, : 3 * c.deter]
        x = torch.rsqrt(variance + EPSILON) * (products - mean * self.core_mean_0) + self.core_bias_0
        xr, xu, xn = x.chunk(3, dim=-1)
        hr, hu, hn = (from_h[:, width:] + self.core_h_bias_0).chunk(3, dim=-1)
        update = torch.sigmoid(xu + hu)
        h = torch.lerp(torch.tanh(xn + torch.sigmoid(xr + hr) * hn), h, update)
        read = F.linear(h, self.read_h_0)
        prior = self.normed(read[:, :width] + self.prior_bias_0, "prior_norm")
        latent = read[:, width:] + self.rows(F.linear(prior, self.prior_out_0, self.prior_out_bias_0), self.read_z_0)
        adapter = self.normed(latent[:, : c.adapter_dim] + self.adapter_bias_0, "adapter_norm")
        x = latent[:, c.adapter_dim :] + F.linear(adapter, self.adapter_heads_0)
        x = (x + from_a[:, 3 * c.deter :] + given + self.heads_bias_0).view(1, 2, width)
        logits = (self.normed(x, "heads_norm") * self.heads_out_0).sum(dim=-1) + self.heads_out_bias_0
        return (h, given), torch.sigmoid(logits)
