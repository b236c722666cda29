"""Files to records: JSON lines, one JSON object, or one JSON array of objects, each also gzip-compressed; Parquet; the
archives of Inspect AI.

Everything streams: memory is a small multiple of the largest single record, whatever the file's size. What
cannot be read becomes a :class:`Broken` with its place and reason, and reading goes on with the next line;
only an array or a gzip stream that breaks ends its file, with one ``Broken`` that says how far it came.

Text is made clean on the way in: a byte that is not UTF-8 and a lone surrogate (``\\ud800`` escapes too)
become U+FFFD, and the tokens NaN, Infinity and -Infinity (Python writes them, JSON does not know them) become
the strings ``"NaN"``, ``"Infinity"`` and ``"-Infinity"``. Both are counted. Raw control characters inside strings
are accepted.
"""

from __future__ import annotations

import codecs
import gzip
import io
import json
import math
import re
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from jaxguard.traces.registry import Record

MAX_RECORD_BYTES = 1 << 29
"""A longer line or array element is rejected unread: it would not fit in memory once parsed."""

MAX_DEPTH = 200
"""Deeper nesting is rejected, so that no later walk over a record can run out of stack."""

SUFFIXES = (".jsonl", ".ndjson", ".json", ".eval", ".parquet")
"""File names (each may be followed by ``.gz``) that a folder walk looks into."""

_BUFFER = 1 << 20
_CHUNK = 1 << 17
_STREAM_ERRORS = (EOFError, zlib.error, gzip.BadGzipFile)
_SURROGATE = re.compile("[\ud800-\udfff]")
_BOM = b"\xef\xbb\xbf"
_ZIP = b"PK\x03\x04"
_PARQUET = (b"PAR1", b"PARE")  # the second where the footer is encrypted


@dataclass(frozen=True, slots=True)
class Parsed:
    """One record; ``position`` counts from 0 over the non-blank records of the file, broken ones included.

    ``size`` is the number of characters that it was parsed from.
    """

    position: int
    record: Record
    surrogates: int = 0
    nonfinite: int = 0
    size: int = 0


@dataclass(frozen=True, slots=True)
class Broken:
    """What stood at ``position`` cannot become a record, for ``reason``."""

    position: int
    reason: str


def has_trace_name(name: str) -> bool:
    """Does a folder walk look into a file of this name?"""
    return name.lower().removesuffix(".gz").endswith(SUFFIXES)


def load_json(path: Path) -> Any:
    """The value of a small JSON file, such as a manifest.

    Raises:
        ValueError: It is not UTF-8, not JSON, or nested too deeply to be parsed.
        OSError: It cannot be read.
    """
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except RecursionError as error:
        raise ValueError("nested too deeply") from error


def read_records(path: Path, at: Callable[[int], object] | None = None) -> Iterator[Parsed | Broken]:
    """The records of a file in order.

    Gzip and Parquet are recognised by their first bytes, not by the name. A bare list of chat messages (a line, or
    the whole file) is one record, ``{"messages": [...]}``; a list that starts with a name is ``{"array": [...]}``.

    Args:
        path: The file.
        at: Told, from time to time, how many bytes of it are read.

    Raises:
        OSError: The file cannot be opened or the disk fails; broken content never raises.
    """
    with path.open("rb", buffering=_BUFFER) as raw:
        head = raw.read(4)
        zipped = head.startswith(b"\x1f\x8b")
        raw.seek(0)
        if head in _PARQUET:
            from jaxguard.traces.parquet import read_rows

            yield from read_rows(path)
            return
        if head == _ZIP and path.name.lower().endswith(".eval"):
            from jaxguard.traces.eval_archive import read_samples

            yield from read_samples(path)
            return
        with gzip.GzipFile(fileobj=raw, mode="rb") if zipped else nullcontext() as unzipped:
            text = raw if unzipped is None else io.BufferedReader(_Unzipped(unzipped), _BUFFER)
            for item in _records(text, path.name):
                if at is not None:
                    at(raw.tell())
                yield item


class _Unzipped(io.RawIOBase):
    """Hands on what is unzipped so far: GzipFile itself would withhold it when the stream breaks in its buffer."""

    def __init__(self, unzipped: gzip.GzipFile) -> None:
        self._unzipped = unzipped

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        data = self._unzipped.read1(min(len(buffer), _CHUNK))
        buffer[: len(data)] = data
        return len(data)


def _records(stream: Any, name: str) -> Iterator[Parsed | Broken]:
    try:
        head = stream.peek(_BUFFER)
        if head.startswith(_BOM):
            stream.read(len(_BOM))
            head = head[len(_BOM) :]
    except _STREAM_ERRORS as error:
        yield Broken(0, f"the gzip stream is broken at its start ({error})")
        return
    if head.startswith(_ZIP):
        yield Broken(0, "a zip archive, expected a log of Inspect AI named .eval, or the files that are in it")
    elif head.startswith(_PARQUET):
        yield Broken(0, "a Parquet file in gzip, expected it unzipped (its columns are compressed already)")
    elif _is_multiline(head.lstrip(), name):
        yield from _document(stream)
    else:
        yield from _lines(stream)


def _is_multiline(head: bytes, name: str) -> bool:
    """Is this one JSON document over several lines (or one array), rather than a document a line?"""
    first, newline, _ = head.partition(b"\n")
    if name.lower().removesuffix(".gz").endswith((".jsonl", ".ndjson")):
        return first.strip() in (b"{", b"[")
    if head.startswith(b"["):
        return True
    if not head.startswith(b"{") or not newline:
        return False
    try:
        json.loads(first, strict=False)
    except (ValueError, RecursionError):
        return True
    return False


def _lines(stream: BinaryIO) -> Iterator[Parsed | Broken]:
    position = number = 0
    while True:
        try:
            line = stream.readline(MAX_RECORD_BYTES)
            whole = len(line) < MAX_RECORD_BYTES or line.endswith(b"\n")
            rest = line
            while not whole and rest and not rest.endswith(b"\n"):
                rest = stream.readline(_BUFFER)
        except _STREAM_ERRORS as error:
            yield Broken(position, f"the gzip stream breaks after {position} records ({error}); the rest is lost")
            return
        if not line:
            return
        number += 1
        if line.isspace():
            continue
        if whole:
            yield parse_record(line, position, f"line {number}")
        else:
            yield Broken(position, f"line {number}: longer than {MAX_RECORD_BYTES} bytes")
        position += 1


def parse_record(data: bytes, position: int, where: str) -> Parsed | Broken:
    """The record that one JSON text is; ``where`` it stands is named in the reason where it is none."""
    text = _decode(data)
    parser = _Parser()
    try:
        value = parser.decoder.decode(text)
        return parser.record(value, position, text)
    except json.JSONDecodeError as error:
        return Broken(position, f"{where}: not JSON: {error.msg} at character {error.pos}")
    except (ValueError, RecursionError) as error:
        return Broken(position, f"{where}: {_reason(error)}")


def _document(stream: io.BufferedReader) -> Iterator[Parsed | Broken]:
    """Values of one array, or values one after another, decoded from a window that slides over the text."""
    window = _Window(stream)
    position = 0
    messages: list[Any] | None = None
    try:
        in_array = window.skip_space() == "["
        if in_array:
            window.advance(1)
        while True:
            mark = window.skip_space()
            if in_array and position and mark == ",":
                window.advance(1)
                mark = window.skip_space()
            elif in_array and position and mark not in ("]", ""):
                raise ValueError(f"found {mark!r} between two records, expected ',' or ']'")
            if in_array and mark == "]":
                window.advance(1)
                break
            if not mark:
                if in_array:
                    raise ValueError("the array is cut off")
                break
            parser = _Parser()
            value, text = window.value(parser)
            if in_array and position == 0 and _is_message(value):
                messages = []
            if messages is None:
                yield parser.record(value, position, text)
                position += 1
            else:
                messages.append(parser.clean(value, text))
                position = len(messages)
        if messages is not None:
            yield Parsed(0, {"messages": messages})
            position = 1
        if in_array and window.skip_space():
            raise ValueError("text after the end of the array")
    except json.JSONDecodeError as error:
        where = window.consumed + error.pos - window.position
        yield Broken(_at(position, messages), f"not JSON: {error.msg} at character {where}; the rest is not read")
    except _STREAM_ERRORS as error:
        at = _at(position, messages)
        yield Broken(at, f"the gzip stream breaks after {at} records ({error}); the rest is lost")
    except (ValueError, RecursionError) as error:
        reason = f"{_reason(error)} at character {window.consumed}; the rest is not read"
        yield Broken(_at(position, messages), reason)


def _at(position: int, messages: list[Any] | None) -> int:
    """A list of messages is a single record, so whatever breaks in it stands at 0."""
    return position if messages is None else 0


class _Window:
    """The undecoded part of a stream as text; grows by doubling until the value at its start is whole."""

    def __init__(self, stream: io.BufferedReader) -> None:
        self.stream = stream
        self.decode = codecs.getincrementaldecoder("utf-8")("surrogateescape").decode
        self.text = ""
        self.position = 0
        self.consumed = 0
        self.ended = False

    def fill(self) -> None:
        chunks = self._read(max(_BUFFER, len(self.text) - self.position))
        self.text = self.text[self.position :] + self.decode(chunks, final=self.ended)
        self.position = 0
        if len(self.text) > MAX_RECORD_BYTES:
            raise ValueError(f"a record longer than {MAX_RECORD_BYTES} characters")

    def _read(self, size: int) -> bytes:
        """``size`` bytes, or what there is before the stream ends or breaks (the next call then raises)."""
        chunks = bytearray()
        while len(chunks) < size and not self.ended:
            try:
                chunk = self.stream.read1(size - len(chunks))
            except _STREAM_ERRORS:
                if not chunks:
                    raise
                break
            chunks += chunk
            self.ended = not chunk
        return bytes(chunks)

    def advance(self, count: int) -> None:
        self.position += count
        self.consumed += count

    def skip_space(self) -> str:
        """Move to the next character that is no white space and return it; ``""`` at the end."""
        while True:
            while self.position < len(self.text):
                if not self.text[self.position].isspace():
                    return self.text[self.position]
                self.advance(1)
            if self.ended:
                return ""
            self.fill()

    def value(self, parser: _Parser) -> tuple[Any, str]:
        """The JSON value at the window's position, and its text."""
        while True:
            try:
                value, end = parser.decoder.raw_decode(self.text, self.position)
            except json.JSONDecodeError as error:
                # A value cut by the window's edge fails at the edge, or in a string that reaches over it.
                cut = error.pos >= len(self.text) - 16 or error.msg.startswith("Unterminated string")
                if self.ended or not cut:
                    raise
            else:
                if end < len(self.text) or self.ended or isinstance(value, dict | list | str):
                    text = self.text[self.position : end]
                    self.advance(end - self.position)
                    return value, text
            self.fill()
            parser.nonfinite, parser.repeated = 0, None


class _Parser:
    """Decodes one JSON value and counts what had to be replaced in it."""

    def __init__(self) -> None:
        self.surrogates = 0
        self.nonfinite = 0
        self.repeated: str | None = None
        self.decoder = json.JSONDecoder(strict=False, parse_constant=self._constant, object_pairs_hook=self._object)

    def _object(self, pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) < len(pairs):
            self.repeated = repeated_key(pairs)
        return found

    def _constant(self, token: str) -> str:
        self.nonfinite += 1
        return token

    def record(self, value: Any, position: int, text: str) -> Parsed | Broken:
        value = self.clean(value, text)
        if isinstance(value, list) and value and isinstance(value[0], dict) and isinstance(value[0].get("role"), str):
            value = {"messages": value}
        if isinstance(value, list) and value and isinstance(value[0], str):
            value = {"array": value}
        if isinstance(value, list):
            return Broken(
                position,
                "the record is a JSON array, expected a JSON object, or an array of chat messages; a file that is one "
                "array of records is read as such where its name ends in .json",
            )
        if not isinstance(value, dict):
            return Broken(position, f"the record is a {type(value).__name__}, expected a JSON object")
        return Parsed(position, value, self.surrogates, self.nonfinite, len(text))

    def clean(self, value: Any, text: str) -> Any:
        """The value without lone surrogates; raises ValueError where it is nested too deeply."""
        repeated, self.repeated = self.repeated, None
        if repeated is not None:  # one of the two values would be lost
            raise ValueError(f"key {repeated!r:.60} stands twice in one object")
        if is_deep(value, text, MAX_DEPTH):
            raise ValueError(f"nested deeper than {MAX_DEPTH} levels")
        # The walk is needed only where the text can hold a surrogate: as an escape, or as an undecodable byte.
        if "\\ud" in text or "\\uD" in text or (not text.isascii() and _SURROGATE.search(text)):
            value, self.surrogates, _ = clean_json(value)
        return value


def decode_value(text: str) -> tuple[Any, int, int]:
    """The value of a JSON text that stands inside a record, cleaned and counted as in :func:`clean_json`.

    Raises:
        ValueError: It is not JSON, nested too deeply, or has a key that stands twice in one object.
    """
    parser = _Parser()
    try:
        value = parser.clean(parser.decoder.decode(text), text)
    except RecursionError as error:
        raise ValueError(_reason(error)) from error
    return value, parser.surrogates, parser.nonfinite


def clean_json(value: Any) -> tuple[Any, int, int]:
    """A JSON-like value that any strict writer accepts, with the counts of what was replaced.

    Returns:
        The value (copied), the number of lone surrogates that became U+FFFD, and the number of non-finite
        floats that became strings.
    """
    surrogates = nonfinite = 0

    def visit(node: Any) -> Any:
        nonlocal surrogates, nonfinite
        if isinstance(node, str):
            if node.isascii():
                return node
            node, count = _SURROGATE.subn("\ufffd", node)
            surrogates += count
            return node
        if isinstance(node, dict):
            return {visit(key): visit(child) for key, child in node.items()}
        if isinstance(node, list | tuple):
            return [visit(child) for child in node]
        if isinstance(node, float) and not math.isfinite(node):
            nonfinite += 1
            return json.dumps(node)
        return node

    return visit(value), surrogates, nonfinite


def is_deep(value: Any, text: str, limit: int) -> bool:
    """Is ``value`` nested deeper than ``limit`` levels? ``text`` is its JSON, which mostly tells without a walk."""
    if text.count("{") + text.count("[") <= limit:
        return False
    level = [value]
    for _ in range(limit):
        level = [
            child
            for node in level
            if type(node) in (dict, list)
            for child in (node.values() if type(node) is dict else node)
            if type(child) in (dict, list)
        ]
        if not level:
            return False
    return True


def repeated_key(pairs: list[tuple[str, Any]]) -> str:
    """A key of a JSON object's pairs that stands there twice."""
    return Counter(key for key, _ in pairs).most_common(1)[0][0]


def _decode(data: bytes) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError:
        return data.decode("utf-8", "surrogateescape")


def _is_message(value: Any) -> bool:
    return (
        isinstance(value, dict) and isinstance(value.get("role"), str) and ("content" in value or "tool_calls" in value)
    )


def _reason(error: Exception) -> str:
    return "nested too deeply" if isinstance(error, RecursionError) else str(error)
