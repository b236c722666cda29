"""HTML pages from the templates beside this module: one environment, in which a missing value is an error."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup

from jaxguard.writing import write_whole

_ENVIRONMENT = jinja2.Environment(
    loader=jinja2.PackageLoader("jaxguard.evaluation"),
    autoescape=True,
    undefined=jinja2.StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
)


@dataclass(frozen=True)
class Section:
    """A part of a page: what it says, a table, charts as (heading, note, SVG)."""

    heading: str
    note: str
    table: Mapping[str, Any] | None = None
    figures: Sequence[tuple[str, str, Markup]] = ()


def script(name: str) -> tuple[Markup, str]:
    """A script beside the templates, and the source that a content security policy names it by: no other one runs."""
    text = (Path(__file__).parent / "templates" / name).read_text(encoding="utf-8")
    return Markup(text), f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def write_page(path: Path, template: str, **values: Any) -> Path:
    """Writes a template filled with values, whole or not at all, and returns its path; the folder must exist."""
    write_whole(path, _ENVIRONMENT.get_template(template).render(**values))
    return path
