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


def _twin(config: ModelConfig, params: Params) -> Any:
    from bench.torch_twin.weights import twin

    return twin(config, params)


def _folded(config: ModelConfig, params: Params) -> Any:
    from bench.torch_twin.folded import FoldedStep

    return FoldedStep(config, params).eval()


def _variant(make: Callable[[ModelConfig, Params], Any], **compilation: Any) -> Callable[[ModelConfig, Params], Step]:
    """A step under `inference_mode`, eager or by `torch.compile` with these settings."""

    def variant(config: ModelConfig, params: Params) -> Step:
        import torch

        use_cores()
        model = make(config, params)
        run = torch.compile(model, fullgraph=True, **compilation) if compilation else model
        with torch.inference_mode():
            state = model.start(torch.zeros(1, config.embed_dim))

        def step(obs: np.ndarray, act: np.ndarray) -> tuple[float, float]:
            with torch.inference_mode():
                _, risks = run(state, torch.from_numpy(obs)[None], torch.from_numpy(act)[None])
                hazard, prefix = risks[0].tolist()
            return hazard, prefix

        return step

    return variant


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


VARIANTS: dict[str, Callable[[ModelConfig, Params], Step]] = {
    "torch eager": _variant(_twin),
    "torch compile": _variant(_twin, mode="default"),
    # Tries several kernels for each product.
    "torch compile, autotuned": _variant(_twin, mode="max-autotune-no-cudagraphs"),
    # Weights as constants, which lets it lay them out for its kernels.
    "torch compile, frozen": _variant(_twin, options={"freezing": True}),
    # With the product's algebra.
    "torch folded": _variant(_folded),
    "torch folded, compile": _variant(_folded, mode="default"),
    "onnxruntime": onnx_runtime,
}
