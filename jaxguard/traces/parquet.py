"""Parquet files, every row a record: tables of chats as they are shared on dataset hubs.

Arrow gives every struct all keys that any row's has, with nulls for those it had not; such nulls are left out again,
and so is a struct inside another that holds nothing else (nobody can tell ``{"city": null}`` from ``{}`` here). A null
in a column of its own, in a list or in a map stays. Lists of messages and their calls that are kept as JSON text are
decoded. What JSON has no type for (times, decimals, bytes) becomes text.
"""

from __future__ import annotations

from collections.abc import Iterator
from datetime import date, time
from pathlib import Path
from typing import Any

from jaxguard.traces import files
from jaxguard.traces.files import Broken, Parsed, clean_json, decode_value

_ROWS = 16  # at a time
# Columns that hold a conversation: text in them is JSON, or the row is broken.
_CONVERSATIONS = ("messages", "conversations", "conversation", "traj", "tool_calls")
# Columns that may hold a plain text as well.
_PERHAPS = ("output", "steps", "tools")
_CALLS = ("tool_calls", "function_call")
_CALL_PARTS = ("tool_use", "tool_result")


def read_rows(path: Path) -> Iterator[Parsed | Broken]:
    """One record for each row, in order; what breaks in the file ends it.

    Raises:
        OSError: The file cannot be opened.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    position = 0
    with path.open("rb") as raw:
        try:
            # Without a buffer in front, a column of a large row group is read bit by bit.
            table = pq.ParquetFile(raw, pre_buffer=False, buffer_size=files._BUFFER)
            names = table.schema_arrow.names
            for name in names:
                if names.count(name) > 1:
                    yield Broken(0, f"column {name!r:.60} stands twice in the Parquet file")
                    return
            for group in range(table.num_row_groups):  # one by one, so that a broken one costs no row before it
                for batch in table.iter_batches(batch_size=_ROWS, row_groups=[group]):
                    for row in range(batch.num_rows):
                        yield _record(batch.slice(row, 1), position)
                        position += 1
        except (pa.ArrowException, OSError) as error:
            reason = " ".join(str(error).split())
            yield Broken(position, f"the Parquet file breaks after {position} rows ({reason:.200}); the rest is lost")


def _record(row: Any, position: int) -> Parsed | Broken:
    """``row`` is a record batch of one row."""
    size = row.nbytes
    if size > files.MAX_RECORD_BYTES:
        return Broken(position, f"row {position}: longer than {files.MAX_RECORD_BYTES} bytes")
    record: dict[str, Any] = {}
    surrogates = nonfinite = 0
    for name, column in zip(row.schema.names, row.columns, strict=True):
        try:
            value = _plain(_python(column), column.type)
            value, replaced, odd = clean_json(value)
            decoder = _Decoder()
            record[name] = decoder.column(name, value)
        except (ValueError, OverflowError, RecursionError) as error:
            return Broken(position, f"row {position}, column {name!r:.60}: {error}")
        surrogates += replaced + decoder.surrogates
        nonfinite += odd + decoder.nonfinite
    return Parsed(position, record, surrogates, nonfinite, size)


def _python(column: Any) -> Any:
    """The one value of a column."""
    import pyarrow as pa

    try:
        return column[0].as_py()
    except UnicodeDecodeError:
        if pa.types.is_string(column.type) or pa.types.is_large_string(column.type):
            return column.cast(pa.large_binary())[0].as_py()
        raise


def _plain(value: Any, kind: Any) -> Any:
    """A value of an Arrow type as JSON has it."""
    import pyarrow as pa

    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, bytes):
        return value.decode("utf-8", "surrogateescape")
    if isinstance(value, date | time):  # a datetime is a date
        return value.isoformat()
    if pa.types.is_dictionary(kind):
        return _plain(value, kind.value_type)
    if isinstance(kind, pa.BaseExtensionType):
        return _plain(value, kind.storage_type)
    if pa.types.is_map(kind):
        found = {_name(key): _plain(child, kind.item_type) for key, child in value}
        if len(found) < len(value):
            raise ValueError("a key stands twice in one map")
        return found
    if pa.types.is_struct(kind):
        children = {field.name: (_plain(value[field.name], field.type), field.type) for field in kind}
        return {
            name: child
            for name, (child, own) in children.items()
            if child is not None and not (child == {} and pa.types.is_struct(own))
        }
    if isinstance(value, list):
        return [_plain(child, kind.value_type) for child in value]
    return str(value)


def _name(key: Any) -> str:
    return key.decode("utf-8", "surrogateescape") if isinstance(key, bytes) else str(key)


class _Decoder:
    """Decodes the JSON texts in a column and counts what had to be replaced in them."""

    def __init__(self) -> None:
        self.surrogates = 0
        self.nonfinite = 0

    def column(self, name: str, value: Any) -> Any:
        """A column that may hold a conversation, with its calls as lists and objects."""
        if name not in (*_CONVERSATIONS, *_PERHAPS):
            return value
        if isinstance(value, str):
            value = self._decoded(value, must=name in _CONVERSATIONS)
        if isinstance(value, dict):
            value = _rows_of(value)
        if isinstance(value, list):
            return [self._message(message) for message in value]
        return value

    def _message(self, message: Any) -> Any:
        if isinstance(message, str):
            message = self._decoded(message, must=False)
        if not isinstance(message, dict):
            return message
        found = dict(message)
        for name in _CALLS:
            if isinstance(found.get(name), str):
                found[name] = self._decoded(found[name], must=True)
        content = found.get("content")
        if isinstance(content, str) and any(f'"{kind}"' in content for kind in _CALL_PARTS):
            parts = self._decoded(content, must=False)
            kinds = {part.get("type") for part in parts if isinstance(part, dict)} if isinstance(parts, list) else set()
            if found.get("role") in ("assistant", "user") and not kinds.isdisjoint(_CALL_PARTS):
                found["content"] = parts
        return found

    def _decoded(self, text: str, must: bool) -> Any:
        """The list or object that a text is in JSON; the text itself where it is none and need not be."""
        if not text.strip():
            return None if must else text
        try:
            value, surrogates, nonfinite = decode_value(text)
        except ValueError as error:
            if must:
                raise ValueError(f"text that is not JSON: {error}") from error
            return text
        if not isinstance(value, list | dict):
            return value if must else text
        self.surrogates += surrogates
        self.nonfinite += nonfinite
        return value


def _rows_of(columns: dict[str, Any]) -> Any:
    """Some writers turn a list of messages into an object of lists, one for each of their keys."""
    lengths = {len(cells) if isinstance(cells, list) else -1 for cells in columns.values()}
    if not ("role" in columns or "from" in columns) or len(lengths) != 1 or -1 in lengths:
        return columns
    rows = zip(*columns.values(), strict=True)
    return [{name: cell for name, cell in zip(columns, row, strict=True) if cell is not None} for row in rows]
