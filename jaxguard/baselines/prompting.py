"""Prompts from template files, and the material in them: delimited, and cut by rule.

A template is a Jinja2 file with the blocks ``system`` (may be empty) and ``user``. ``data`` in it is the material as
one line of JSON, and ``tag`` a mark of its content to fence it with: text of strangers can neither begin a line of
its own nor know the mark. Templates of jaxguard are in ``prompts/``; another file may stand in for any of them.

What is cut, in this order, until the material is no longer than ``longest_prompt`` characters: every text of more
than ``longest_text`` characters loses its middle; then the earliest calls go, latest last; then texts lose more of
their middle. What was cut says so in its place. The proposed call and the task stay whatever goes.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jinja2

from jaxguard.types import JaxguardError

BLOCKS = ("system", "user")
SHORTEST_TEXT = 64
"""Characters; texts are not cut below this."""
_LEFT_OUT = "earlier_calls_left_out"


class PromptFileError(JaxguardError):
    """A template cannot be read or filled."""


class TooLong(JaxguardError):
    """Material stays too long however it is cut."""


@dataclass(frozen=True)
class Limits:
    """Most characters of one text and of the whole material; see the module."""

    longest_text: int = 2_000
    longest_prompt: int = 24_000


class PromptFile:
    """A template.

    Args:
        name: Of a template in ``folder``, or the path of a file of one's own.
        package: Whose ``prompts`` folder holds the named ones.

    Attributes:
        digest: Of its text.

    Raises:
        PromptFileError: It cannot be read, is no template, or lacks a block.
    """

    def __init__(self, name: str | Path, package: str = "jaxguard.baselines"):
        try:
            loader = jinja2.PackageLoader(package, "prompts")
            environment = jinja2.Environment(
                loader=loader, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
            )
            if isinstance(name, Path):
                source = name.read_text(encoding="utf-8")
            else:
                source = loader.get_source(environment, f"{name}.j2")[0]
            self._template = environment.from_string(source)
        except (OSError, UnicodeDecodeError, jinja2.TemplateError) as error:
            raise PromptFileError(f"prompt template {name}: {type(error).__name__}: {error}") from error
        missing = [block for block in BLOCKS if block not in self._template.blocks]
        if missing:
            raise PromptFileError(
                f"prompt template {name}: lacks the block {missing[0]}, expected {' and '.join(BLOCKS)}"
            )
        self.name = str(name)
        self.digest = hashlib.sha256(source.encode()).hexdigest()[:12]

    def messages(self, data: str = "", **values: Any) -> list[dict[str, str]]:
        """The conversation that asks about ``data``; an empty system part is left out.

        Raises:
            PromptFileError: The template asks for a value that is not there.
        """
        tag = hashlib.sha256(data.encode("utf-8", "replace")).hexdigest()[:16]
        context = self._template.new_context({"data": data, "tag": tag, **values})
        try:
            parts = {block: "".join(self._template.blocks[block](context)).strip() for block in BLOCKS}
        except jinja2.TemplateError as error:
            raise PromptFileError(f"prompt template {self.name}: {error}") from error
        return [{"role": block, "content": text} for block, text in parts.items() if text]


def material(value: dict[str, Any], limits: Limits, calls: str = "trace") -> str:
    """``value`` as one line of JSON within the limits.

    Args:
        value: JSON values.
        limits: See the module.
        calls: Key of the list whose earliest entries may go.

    Raises:
        TooLong: It cannot be cut so far.
    """
    longest, every = limits.longest_text, list(value.get(calls, ()))
    while True:
        cut = {key: _shortened(part, longest) for key, part in value.items()} | {calls: []}
        entries = [_shortened(entry, longest) for entry in every]
        room = limits.longest_prompt - len(_line(cut | {_LEFT_OUT: len(entries)}))
        first = len(entries)
        while first and (needed := len(_line(entries[first - 1])) + 1) <= room:
            first, room = first - 1, room - needed
        shortest = longest <= SHORTEST_TEXT
        if room >= 0 and (first < len(entries) or not entries or shortest):
            return _line(cut | {calls: entries[first:]} | ({_LEFT_OUT: first} if first else {}))
        if shortest:
            raise TooLong(f"material: is longer than {limits.longest_prompt:,} characters however it is cut")
        longest = max(longest // 2, SHORTEST_TEXT)


def _shortened(value: Any, longest: int) -> Any:
    if isinstance(value, str) and len(value) > longest:
        half = longest // 2
        return f"{value[:half]} [... {len(value) - 2 * half:,} characters left out ...] {value[-half:]}"
    if isinstance(value, dict):
        return {key: _shortened(part, longest) for key, part in value.items()}
    return [_shortened(part, longest) for part in value] if isinstance(value, list | tuple) else value


def _line(value: Any) -> str:
    """One line whatever a text holds: the line separators that JSON lets stand are escaped too."""
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    return text.replace("\u2028", "\\u2028").replace("\u2029", "\\u2029").replace("\x85", "\\u0085")


def as_texts(parts: Sequence[str]) -> str:
    """Texts that became visible one after the other, as one observation."""
    return "\n".join(part for part in parts if part)
