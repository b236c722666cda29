"""A live step in PyTorch and ONNX Runtime: the twin as it is, compiled, exported, and with the product's algebra."""

from __future__ import annotations

import io
import os
from collections.abc import Callable
from typing import Any

import numpy as np

from bench.jax_variants import Step
from jaxguard.config import ModelConfig
from jaxguard.world_model.params import Params


def use_cores() -> None:
    """As many threads as cores are allowed now: more of them wait for each other."""
    import torch

    torch.set_num_threads(len(os.sched_getaffinity(0)))


def _stepper(config: ModelConfig, params: Params, change: Callable) -> Step:
    import torch

    from bench.torch_twin.weights import twin

    use_cores()
    model = twin(config, params)
    run = change(model)
    with torch.inference_mode():
        state = model.start(torch.zeros(1, config.embed_dim))

    def step(obs: np.ndarray, act: np.ndarray) -> tuple[float, float]:
        with torch.inference_mode():
            _, risks = run(state, torch.from_numpy(obs)[None], torch.from_numpy(act)[None])
            hazard, prefix = risks[0].tolist()
        return hazard, prefix

    return step


def eager(config: ModelConfig, params: Params) -> Step:
    """Eager, under `inference_mode`."""
    return _stepper(config, params, lambda model: model)


def compiled(config: ModelConfig, params: Params) -> Step:
    """`torch.compile`, default mode."""
    import torch

    return _stepper(config, params, lambda model: torch.compile(model, fullgraph=True))


def autotuned(config: ModelConfig, params: Params) -> Step:
    """`torch.compile`, the mode that tries several kernels for each product."""
    import torch

    mode = "max-autotune" if torch.cuda.is_available() else "max-autotune-no-cudagraphs"
    return _stepper(config, params, lambda model: torch.compile(model, fullgraph=True, mode=mode))


def _folded(config: ModelConfig, params: Params, change: Callable) -> Step:
    import torch

    from bench.torch_twin.folded import FoldedStep

    use_cores()
    model = FoldedStep(config, params).eval()
    run = change(model)
    with torch.inference_mode():
        h, given = model.start(torch.zeros(1, config.embed_dim))

    def step(obs: np.ndarray, act: np.ndarray) -> tuple[float, float]:
        with torch.inference_mode():
            _, risks = run(h, given, torch.from_numpy(obs)[None], torch.from_numpy(act)[None])
            hazard, prefix = risks[0].tolist()
        return hazard, prefix

    return step


def folded(config: ModelConfig, params: Params) -> Step:
    """The product's algebra, eager."""
    return _folded(config, params, lambda model: model)


def folded_compiled(config: ModelConfig, params: Params) -> Step:
    """The product's algebra, `torch.compile`."""
    import torch

    return _folded(config, params, lambda model: torch.compile(model, fullgraph=True))


def export_session(config: ModelConfig, params: Params, batch: int) -> tuple[Any, dict[str, np.ndarray]]:
    """The twin's export, in float32, as a session of ONNX Runtime, and what of its inputs stands still."""
    import onnx  # noqa: F401  the exporter needs both, and says so late
    import onnxruntime
    import onnxscript  # noqa: F401
    import torch

    from bench.torch_twin.export import StepForExport
    from bench.torch_twin.weights import twin

    use_cores()
    model = StepForExport(twin(config, params)).eval()
    with torch.inference_mode():
        h, e = model.start(torch.zeros(batch, config.embed_dim))
    obs, act = torch.zeros(2, batch, config.embed_dim).unbind()  # not one tensor twice: it would be one input
    data = io.BytesIO()
    torch.onnx.export(model, (h, e, obs, act), dynamo=True, verbose=False).save(data)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    options.inter_op_num_threads = 1
    session = onnxruntime.InferenceSession(data.getvalue(), options, providers=["CPUExecutionProvider"])
    return session, {"h": h.numpy(), "e": e.numpy()}


def onnx_runtime(config: ModelConfig, params: Params) -> Step:
    """ONNX Runtime, float32."""
    session, fixed = export_session(config, params, 1)

    def step(obs: np.ndarray, act: np.ndarray) -> tuple[float, float]:
        _, risks = session.run(None, {**fixed, "obs": obs[None], "act": act[None]})
        return float(risks[0, 0]), float(risks[0, 1])

    return step


def frozen(config: ModelConfig, params: Params) -> Step:
    """`torch.compile` with the weights as constants, which lets it lay them out for its kernels."""
    import torch

    return _stepper(config, params, lambda model: torch.compile(model, fullgraph=True, options={"freezing": True}))


VARIANTS: dict[str, Callable[[ModelConfig, Params], Step]] = {
    "torch eager": eager,
    "torch compile": compiled,
    "torch compile, autotuned": autotuned,
    "torch compile, frozen": frozen,
    "torch folded": folded,
    "torch folded, compile": folded_compiled,
    "onnxruntime": onnx_runtime,
}
