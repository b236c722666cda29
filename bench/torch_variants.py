"""A live step in PyTorch and ONNX Runtime: the twin as it is, compiled, exported, and with the product's algebra.

Everything runs where jax does: on the CPU, or on its GPU.
"""

from __future__ import annotations

import io
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np

from bench.jax_variants import Step
from bench.measure import CannotRun
from jaxguard.config import ModelConfig
from jaxguard.world_model.params import Params


def device() -> Any:
    """Where jax computes; and as many threads as cores are allowed now, because more of them wait for each other."""
    import torch

    torch.set_num_threads(len(os.sched_getaffinity(0)))
    if jax.default_backend() == "cpu":
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise CannotRun(f"jax computes on {jax.default_backend()}, and this PyTorch sees no GPU")
    return torch.device("cuda")


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

        place = device()
        if compilation.get("mode") == "reduce-overhead" and place.type == "cpu":
            raise CannotRun("CUDA graphs need a GPU")
        model = make(config, params).to(place)
        run = torch.compile(model, fullgraph=True, **compilation) if compilation else model
        with torch.inference_mode():
            state = model.start(torch.zeros(1, config.embed_dim, device=place))

        def step(obs: np.ndarray, act: np.ndarray) -> tuple[float, float]:
            with torch.inference_mode():
                _, risks = run(state, *(torch.from_numpy(x)[None].to(place) for x in (obs, act)))
                hazard, prefix = risks[0].tolist()
            return hazard, prefix

        return step

    return variant


def cuda_graph(config: ModelConfig, params: Params) -> Step:
    """The twin's kernels recorded once and replayed in one launch, by hand."""
    import torch

    place = device()
    if place.type == "cpu":
        raise CannotRun("CUDA graphs need a GPU")
    model = _twin(config, params).to(place)
    host = torch.zeros(2, 1, config.embed_dim).pin_memory()
    x = host.to(place)
    with torch.inference_mode():
        state = model.start(torch.zeros(1, config.embed_dim, device=place))
        aside = torch.cuda.Stream()
        aside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(aside):  # libraries set themselves up, which cannot be recorded
            model(state, *x)
        torch.cuda.current_stream().wait_stream(aside)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            _, risks = model(state, *x)

    def step(obs: np.ndarray, act: np.ndarray) -> tuple[float, float]:
        np.stack([obs, act], out=host.numpy()[:, 0])
        x.copy_(host, non_blocking=True)
        graph.replay()
        hazard, prefix = risks[0].tolist()
        return hazard, prefix

    return step


def aot_inductor(config: ModelConfig, params: Params) -> Step:
    """The twin compiled ahead of time into a library that runs without Python."""
    import torch

    model, state, example = _for_export(config, params, 1)
    place = device()
    with torch.no_grad(), tempfile.TemporaryDirectory() as folder:
        program = torch.export.export(model, (*state, *example))
        path = torch._inductor.aoti_compile_and_package(program, package_path=str(Path(folder) / "step.pt2"))
        run = torch._inductor.aoti_load_package(path)

    def step(obs: np.ndarray, act: np.ndarray) -> tuple[float, float]:
        with torch.inference_mode():
            _, risks = run(*state, *(torch.from_numpy(x)[None].to(place) for x in (obs, act)))
            hazard, prefix = risks[0].tolist()
        return hazard, prefix

    return step


def _for_export(config: ModelConfig, params: Params, batch: int) -> tuple[Any, Any, Any]:
    """A module of tensors alone, what of its inputs stands still (``h``, ``e``), and examples of the others."""
    import torch

    from bench.torch_twin.export import StepForExport

    place = device()
    model = StepForExport(_twin(config, params)).eval().to(place)
    with torch.no_grad():
        state = model.start(torch.zeros(batch, config.embed_dim, device=place))
    # Not one tensor twice: it would be one input.
    return model, state, torch.zeros(2, batch, config.embed_dim, device=place).unbind()


def export_session(config: ModelConfig, params: Params, batch: int) -> tuple[Any, dict[str, np.ndarray]]:
    """The twin's export, in float32, as a session of ONNX Runtime, and what of its inputs stands still."""
    import onnx  # noqa: F401  the exporter needs both, and says so late
    import onnxruntime
    import onnxscript  # noqa: F401
    import torch

    if jax.default_backend() != "cpu":
        raise CannotRun(f"measured on the CPU only, and jax computes on {jax.default_backend()}")
    model, (h, e), example = _for_export(config, params, batch)
    data = io.BytesIO()
    torch.onnx.export(model, (h, e, *example), dynamo=True, verbose=False).save(data)
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
    "torch compile, CUDA graphs": _variant(_twin, mode="reduce-overhead"),
    "torch CUDA graph": cuda_graph,
    "torch AOTInductor": aot_inductor,
    # With the product's algebra.
    "torch folded": _variant(_folded),
    "torch folded, compile": _variant(_folded, mode="default"),
    "onnxruntime": onnx_runtime,
}
