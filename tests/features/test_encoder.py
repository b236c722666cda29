"""Encoder settings and presets."""

from __future__ import annotations

import pytest

from jaxguard.features.encoder import PRESETS, Encoder, EncoderSettings, load_encoder
from jaxguard.types import JaxguardError


def test_presets_fill_what_is_not_given() -> None:
    qwen = EncoderSettings("qwen3-4b-instruct-2507", path="/models/q", device="cuda").filled()
    assert (qwen.layer, qwen.path, qwen.device, qwen.dtype) == (31, "/models/q", "cuda", "bfloat16")
    assert EncoderSettings(layer=0).filled().layer == 0
    assert EncoderSettings().filled() == PRESETS["minilm"]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (EncoderSettings("bert"), "encoder name: got 'bert'"),
        (EncoderSettings("hf", layer=1), "path is not set"),
        (EncoderSettings("hf", path="x"), "layer is not set"),
        (EncoderSettings("qwen3-4b-instruct-2507"), "path is not set"),
        (EncoderSettings(path="x"), "got path 'x'"),
        (EncoderSettings(layer=7), r"layer: got 7, expected 0\.\.6"),
        (EncoderSettings(max_tokens=2), r"max_tokens: got 2, expected 3\.\.512"),
        (EncoderSettings(dtype="float16"), "dtype: got 'float16'"),
    ],
)
def test_settings_that_cannot_work_say_why(settings: EncoderSettings, message: str) -> None:
    with pytest.raises(JaxguardError, match=message):
        load_encoder(settings)


def test_the_default_is_the_embedded_encoder() -> None:
    encoder = load_encoder()
    assert isinstance(encoder, Encoder)
    assert (encoder.dim, encoder.fingerprint.model, encoder.fingerprint.layer) == (384, "all-MiniLM-L6-v2", 3)
