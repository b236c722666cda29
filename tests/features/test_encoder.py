"""Encoder settings and presets."""

from __future__ import annotations

import pytest

from jaxguard.config import EncoderConfig
from jaxguard.features.encoder import PRESETS, Encoder, filled, load_encoder
from jaxguard.types import JaxguardError


def test_presets_fill_what_is_not_given() -> None:
    qwen = filled(EncoderConfig("qwen3-4b-instruct-2507", path="/models/q", device="cuda"))
    assert (qwen.layer, qwen.path, qwen.device, qwen.dtype) == (31, "/models/q", "cuda", "bfloat16")
    assert filled(EncoderConfig(layer=0)).layer == 0
    assert filled(EncoderConfig()) == PRESETS["minilm"]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (EncoderConfig("bert"), "encoder.name: got 'bert'"),
        (EncoderConfig("hf", layer=1), "path is not set"),
        (EncoderConfig("hf", path="x"), "layer is not set"),
        (EncoderConfig("qwen3-4b-instruct-2507"), "path is not set"),
        (EncoderConfig(path="x"), "got path 'x'"),
        (EncoderConfig(layer=7), r"layer: got 7, expected 0\.\.6"),
        (EncoderConfig(max_tokens=2), r"max_tokens: got 2, expected 3\.\.512"),
        (EncoderConfig(dtype="float16"), "dtype: got 'float16'"),
    ],
)
def test_settings_that_cannot_work_say_why(settings: EncoderConfig, message: str) -> None:
    with pytest.raises(JaxguardError, match=message):
        load_encoder(settings)


def test_the_default_is_the_embedded_encoder() -> None:
    encoder = load_encoder()
    assert isinstance(encoder, Encoder)
    assert (encoder.dim, encoder.fingerprint.model, encoder.fingerprint.layer) == (384, "all-MiniLM-L6-v2", 3)
