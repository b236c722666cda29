"""Settings as frozen dataclasses: from nested mappings, one YAML file and dotted overrides, and back.

Unknown keys, wrong types and impossible values are errors that name the key.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
import types
import typing
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from jaxguard.strict_yaml import load_yaml
from jaxguard.types import JaxguardError
from jaxguard.writing import write_whole

T = typing.TypeVar("T")


class ConfigError(JaxguardError):
    """A configuration key is unknown or its value impossible."""


def require(condition: bool, key: str, value: object, expected: str) -> None:
    if not condition:
        raise ConfigError(f"{key}: got {value!r}, expected {expected}")


def require_at_least(config: object, section: str, least: int, *names: str) -> None:
    for name in names:
        require((value := getattr(config, name)) >= least, f"{section}.{name}", value, f"{least} or more")


def require_at_most(config: object, section: str, most: int, *names: str) -> None:
    for name in names:
        require((value := getattr(config, name)) <= most, f"{section}.{name}", value, f"at most {most:,}")


def require_positive(config: object, section: str, *names: str) -> None:
    for name in names:
        require((value := getattr(config, name)) > 0, f"{section}.{name}", value, "a positive number")


def require_seed(seed: int, section: str) -> None:
    require(0 <= seed < 2**31, f"{section}.seed", seed, "0 to 2147483647")


def to_dict(settings: Any) -> dict[str, Any]:
    """The settings as plain JSON-like values (tuples become lists)."""
    return typing.cast(dict[str, Any], _plain(dataclasses.asdict(settings)))


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {k: _plain(v) for k, v in value.items()}
    if isinstance(value, tuple | list):
        return [_plain(v) for v in value]
    return value


def from_dict(values: Mapping[str, Any], cls: type[T], prefix: str = "") -> T:
    """Builds ``cls`` from nested mappings; keys that ``cls`` lacks raise :class:`ConfigError`."""
    if not isinstance(values, Mapping):
        raise ConfigError(f"{prefix.rstrip('.') or 'config'}: got {values!r}, expected a mapping of keys")
    hints = typing.get_type_hints(cls)
    known = {f.name for f in dataclasses.fields(typing.cast(Any, cls))}
    arguments: dict[str, Any] = {}
    for key, value in values.items():
        if key not in known:
            close = difflib.get_close_matches(str(key), known, n=1)
            hint = f"did you mean {prefix}{close[0]}? " if close else ""
            raise ConfigError(f"{prefix}{key}: unknown key; {hint}known here: {', '.join(sorted(known))}")
        arguments[key] = _convert(value, hints[key], f"{prefix}{key}")
    return cls(**arguments)


def _convert(value: Any, hint: Any, key: str) -> Any:
    if dataclasses.is_dataclass(hint):
        cls = typing.cast(type[Any], hint)
        if hasattr(cls, "presets"):
            if isinstance(value, str):
                return _preset(value, cls, key)
            if isinstance(value, Mapping) and "preset" in value:
                rest = {k: v for k, v in value.items() if k != "preset"}
                return from_dict({**to_dict(_preset(value["preset"], cls, f"{key}.preset")), **rest}, cls, f"{key}.")
        return from_dict(value, cls, f"{key}.")
    options = typing.get_args(hint) if typing.get_origin(hint) in (typing.Union, types.UnionType) else (hint,)
    if value is None:
        if type(None) in options:
            return None
        raise ConfigError(f"{key}: got null, expected {_name(hint)}")
    if isinstance(value, int) and value.bit_length() > 63:  # too long to be shown, perhaps
        raise ConfigError(f"{key}: got an integer of {value.bit_length()} bits, expected one of 63 at most")
    for option in options:
        if typing.get_origin(option) is tuple:
            items = [value] if isinstance(value, str) else value
            if isinstance(items, list | tuple) and all(isinstance(v, str) for v in items):
                return tuple(items)
        elif option is float and isinstance(value, int | float | str) and not isinstance(value, bool):
            try:  # YAML 1.1 reads 2e-4 (no dot) as text
                number = float(value)
            except (ValueError, OverflowError):
                continue
            require(math.isfinite(number), key, value, "a finite number")
            return number
        elif option in (int, str, bool) and type(value) is option:
            return value
    raise ConfigError(f"{key}: got {value!r} ({type(value).__name__}), expected {_name(hint)}")


def _preset(name: object, cls: Any, key: str) -> Any:
    presets = cls.presets()
    require(isinstance(name, str) and name in presets, key, name, f"one of {', '.join(presets)}")
    return presets[name]


def _name(hint: Any) -> str:
    return hint.__name__ if isinstance(hint, type) else str(hint)


def load_settings(path: str | Path | None, overrides: Sequence[str], cls: type[T]) -> T:
    """Reads a YAML file (or nothing) and applies ``key.sub=value`` overrides in order.

    A class with ``recipes()``, groups of settings by name, also takes ``recipe``: in the file it overrides the file's
    own settings, among the overrides whatever came before it.

    Raises:
        ConfigError: unreadable file, unknown key, wrong type or impossible value.
    """
    values: dict[str, Any] = {}
    if path is not None:
        try:
            text = Path(path).read_text(encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"config file {path}: {error.strerror or error}") from error
        except UnicodeDecodeError as error:
            raise ConfigError(f"config file {path}: not UTF-8 text: {error}") from error
        loaded = _yaml(text, f"config file {path}")
        if loaded is not None and not isinstance(loaded, dict):
            raise ConfigError(f"config file {path}: got {type(loaded).__name__}, expected a mapping of keys")
        values = loaded or {}
    return _overridden(values, overrides, cls)


def override(settings: T, overrides: Sequence[str]) -> T:
    """``settings`` with ``key.sub=value`` applied in order; raises as :func:`load_settings`."""
    return _overridden(to_dict(settings), overrides, type(settings))


def _overridden(values: dict[str, Any], overrides: Sequence[str], cls: type[T]) -> T:
    recipes: Mapping[str, Mapping[str, Any]] = getattr(cls, "recipes", dict)()
    settings: list[tuple[str, Any]] = [("recipe", values.pop("recipe"))] if "recipe" in values else []
    for setting in overrides:
        key, separator, raw = setting.partition("=")
        if not separator or not key:
            raise ConfigError(f"override {setting!r:.80}: expected key=value, e.g. stage1.steps=500")
        settings.append((key, _yaml(raw, f"override {setting!r:.80}")))
    for key, value in settings:
        group: Mapping[str, Any] = {key: value}
        if key == "recipe" and recipes:
            require(isinstance(value, str) and value in recipes, key, value, f"one of {', '.join(recipes)}")
            group = recipes[value]
        for name, part in group.items():
            _assign(values, name.split("."), part, name)
    return from_dict(values, cls)


def _yaml(text: str, what: str) -> Any:
    """The value that ``text`` holds; an error is one line."""
    try:
        return load_yaml(text)
    except yaml.YAMLError as error:
        raise ConfigError(f"{what}: not valid YAML: {' '.join(str(error).split())}") from error


def _assign(values: dict[str, Any], path: list[str], value: Any, key: str) -> None:
    for part in path[:-1]:
        child = values.get(part)
        if part == "model" and isinstance(child, str):
            child = {"preset": child}
        if child is None:
            child = {}
        if not isinstance(child, dict):
            raise ConfigError(f"override {key}: {part} holds {child!r}, expected a group of keys")
        values[part] = child
        values = child
    values[path[-1]] = value


def dump_settings(settings: Any, path: str | Path) -> None:
    """Writes every key, defaults included, as YAML that :func:`load_settings` reads back equal; whole or not at all."""
    write_whole(Path(path), yaml.safe_dump(to_dict(settings), sort_keys=False))
