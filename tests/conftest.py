"""Fixtures shared by all tests."""

from __future__ import annotations

import os
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def data_dir() -> Path:
    """Folder of the development data sets; tests that need it are skipped where it is absent."""
    name = os.environ.get("JAXGUARD_DATA")
    if not name:
        pytest.skip("JAXGUARD_DATA is not set")
    path = Path(name)
    if not path.is_dir():
        pytest.fail(f"JAXGUARD_DATA: {path} is not a folder")
    return path
