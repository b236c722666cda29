"""Weights of the Flax model as a PyTorch state dict, and back; both go through safetensors files."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import torch
from safetensors.numpy import load_file, save_file

from bench.torch_twin.model import RSSM
from jaxguard.config import ModelConfig
from jaxguard.world_model.params import Params, flatten, unflatten

# Flax names the parts of the core by what they multiply, torch.nn.GRUCell has its own names. Gates stand in the
# same order (reset, update, candidate).
_CORE = {
    "core.inputs.kernel": "core.gru.weight_ih",
    "core.inputs.bias": "core.gru.bias_ih",
    "core.recurrent.kernel": "core.gru.weight_hh",
    "core.recurrent.bias": "core.gru.bias_hh",
}
_CORE_BACK = {torch_name: name for name, torch_name in _CORE.items()}


def to_torch(params: Params) -> dict[str, np.ndarray]:
    """A state dict of :class:`bench.torch_twin.model.RSSM` from Flax parameters."""
    # Flax stores [in, out], PyTorch [out, in].
    return {
        _CORE.get(name) or re.sub(r"\.(kernel|scale)$", ".weight", name): (
            np.ascontiguousarray(array.T) if name.endswith(".kernel") else array
        )
        for name, array in flatten(params).items()
    }


def to_flax(state: dict[str, np.ndarray], config: ModelConfig) -> Params:
    """Flax parameters from a state dict, checked against ``config``."""
    result = {}
    for name, array in state.items():
        if name in _CORE_BACK:
            result[_CORE_BACK[name]] = array.T if array.ndim == 2 else array
        elif name.endswith(".weight"):
            kind = "kernel" if array.ndim == 2 else "scale"
            result[f"{name.removesuffix('weight')}{kind}"] = array.T if array.ndim == 2 else array
        else:
            result[name] = array
    return unflatten(result, config)


def save(params: Params, path: Path) -> None:
    """Writes Flax parameters as PyTorch weights."""
    save_file(to_torch(params), path)


def load(path: Path, config: ModelConfig) -> Params:
    """Reads PyTorch weights as Flax parameters."""
    return to_flax(load_file(path), config)


def twin(config: ModelConfig, params: Params) -> RSSM:
    """The PyTorch model with these weights, ready to score."""
    pooled = bool(np.any(np.asarray(params["pooled_head"]["kernel"])))
    model = RSSM(config, pooled)
    # Copied: arrays of JAX are read-only.
    model.load_state_dict({name: torch.tensor(array) for name, array in to_torch(params).items()})
    return model.eval()
