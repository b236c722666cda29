"""HTML pages from the templates beside this module: one environment, in which a missing value is an error."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jinja2

_ENVIRONMENT = jinja2.Environment(
    loader=jinja2.PackageLoader("jaxguard.evaluation"),
    autoescape=True,
    undefined=jinja2.StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
)


def write_page(path: Path, template: str, **values: Any) -> Path:
    """Writes a template filled with values, and returns its path; the folder must exist."""
    path.write_text(_ENVIRONMENT.get_template(template).render(**values), encoding="utf-8")
    return path
