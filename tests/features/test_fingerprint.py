"""Encoder fingerprints: stable, exact, and able to say what differs."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path

import pytest

from jaxguard.features.fingerprint import EncoderFingerprint, hash_files, tokenizer_files
from jaxguard.types import JaxguardError

BASE = EncoderFingerprint("m", "abc", 3, "mean", "float32", 256, "windows", template=1)


def test_json_is_stable_and_reads_back() -> None:
    assert BASE.to_json() == (
        '{"chunking":"windows","dtype":"float32","layer":3,"max_tokens":256,"model":"m","pooling":"mean",'
        '"template":1,"weights":"abc"}'
    )
    assert EncoderFingerprint.from_dict(BASE.to_dict()) == BASE


@pytest.mark.parametrize("field", dataclasses.fields(EncoderFingerprint), ids=lambda field: field.name)
def test_every_field_changes_the_hash_and_is_named(field: dataclasses.Field) -> None:
    value = getattr(BASE, field.name)
    other = dataclasses.replace(BASE, **{field.name: value + 1 if isinstance(value, int) else value + "x"})
    assert other.short != BASE.short
    assert BASE.differences(other) == f"{field.name}: {value} != {getattr(other, field.name)}"
    assert BASE.differences(BASE) == ""


@pytest.mark.parametrize(
    ("change", "message"),
    [({"layer": "3"}, "layer is '3', expected int"), ({"extra": 1}, "got fields"), ({"model": 5}, "model is 5")],
)
def test_from_dict_checks_fields_and_types(change: dict[str, object], message: str) -> None:
    with pytest.raises(JaxguardError, match=message):
        EncoderFingerprint.from_dict({**BASE.to_dict(), **change})


def test_hash_of_files_depends_on_contents_and_names_not_on_order(tmp_path: Path) -> None:
    a, b = tmp_path / "a", tmp_path / "b"
    a.write_bytes(b"one")
    b.write_bytes(b"two")
    first = hash_files([a, b])
    assert first == hash_files([b, a])
    assert len(first) == 16
    b.write_bytes(b"twO")
    os.utime(b, ns=(1, 1))
    assert hash_files([a, b]) != first
    assert hash_files([a]) != hash_files([b])
    with pytest.raises(JaxguardError, match="nowhere"):
        hash_files([tmp_path / "nowhere"])


def test_a_tokenizer_is_its_one_file_or_the_files_that_it_is_made_of(tmp_path: Path) -> None:
    assert tokenizer_files(tmp_path) == []
    for name in ("vocab.json", "merges.txt", "spm.model", "README.md"):
        (tmp_path / name).write_text(name)
    before = hash_files(tokenizer_files(tmp_path))
    (tmp_path / "vocab.json").write_text("other")
    assert hash_files(tokenizer_files(tmp_path)) != before
    (tmp_path / "tokenizer.json").write_text("{}")
    assert tokenizer_files(tmp_path) == [tmp_path / "tokenizer.json"]
    (tmp_path / "tokenizer_config.json").write_text("{}")
    assert tokenizer_files(tmp_path) == [tmp_path / "tokenizer.json", tmp_path / "tokenizer_config.json"]
