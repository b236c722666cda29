"""YAML without what would silently lose a setting."""

from __future__ import annotations

from typing import Any

import yaml


class _Loader(yaml.SafeLoader):
    """Refuses a key that stands twice: of the two, one would be lost."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen = set()
        for key, _ in node.value:
            if key.tag != "tag:yaml.org,2002:merge" and (name := key.value) in seen:
                raise yaml.constructor.ConstructorError(None, None, f"key {name!r:.60} stands twice", key.start_mark)
            elif isinstance(key.value, str):
                seen.add(key.value)
        return super().construct_mapping(node, deep)


def load_yaml(text: str) -> Any:
    """The plain value that ``text`` holds.

    Raises:
        yaml.YAMLError: not YAML, nested too deeply, or a key stands twice in one mapping.
    """
    try:
        return yaml.load(text, _Loader)
    except RecursionError:
        raise yaml.YAMLError("nested too deeply") from None
    # Besides its own errors, PyYAML lets through what Python raises for 2020-13-45, "!!int x" or "!!timestamp x".
    except (ValueError, TypeError, LookupError, AttributeError) as error:
        raise yaml.YAMLError(str(error)) from error
