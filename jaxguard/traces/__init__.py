"""Text in: agent traces of any known format to trajectories, and leak-free splits of them. NumPy at most, no JAX."""

from jaxguard.traces.convert import ConvertError, ConvertReport, convert
from jaxguard.traces.jsonl import SchemaError, from_json, read_trajectories, to_json, write_trajectories
from jaxguard.traces.registry import Context, Reader, RecordError, all_readers, detect, reader_named
from jaxguard.traces.splits import SplitError, load_splits, make_splits, save_splits

__all__ = [
    "Context",
    "ConvertError",
    "ConvertReport",
    "Reader",
    "RecordError",
    "SchemaError",
    "SplitError",
    "all_readers",
    "convert",
    "detect",
    "from_json",
    "load_splits",
    "make_splits",
    "read_trajectories",
    "reader_named",
    "save_splits",
    "to_json",
    "write_trajectories",
]
