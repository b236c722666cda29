"""The house rules that imports can show: data flows one way, and heavy packages load where they are used."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "jaxguard"
# Each layer may import from itself and from those before it; members of one layer are strangers to each other.
LAYERS: tuple[tuple[str, ...], ...] = (
    ("types", "strict_yaml", "versions", "ranking", "writing"),
    ("settings",),
    ("config",),
    ("route_config",),
    ("traces",),
    ("features",),
    ("world_model",),
    ("training",),
    ("inputs", "results", "bundles"),
    ("decision",),
    ("sessions",),
    ("guard",),
    ("router",),
    ("scoring", "evaluation", "baselines"),
    ("run", "route_run", "benchmarks", "online"),
    ("diagnosis", "rivals", "shipping", "arena"),
    ("experiments",),
    ("route_cli", "audit_cli", "rivals_cli", "llm_cli", "experiment_cli", "arena_cli"),
    ("cli",),
    ("__main__",),
)
LEVEL = {name: level for level, names in enumerate(LAYERS) for name in names}


def imports(tree: ast.AST, package: str) -> Iterator[tuple[int, str]]:
    """``(line, absolute module name)`` of every import, wherever it stands; both names of ``from a import b``."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            parts = package.split(".")
            base = parts[: len(parts) - node.level + 1] if node.level else []
            module = ".".join([*base, node.module] if node.module else base)
            yield from ((node.lineno, f"{module}.{alias.name}") for alias in node.names)


def part_of(module: str) -> str | None:
    """The layer's name within jaxguard; None for other packages and for jaxguard itself."""
    root, _, rest = module.partition(".")
    name = rest.partition(".")[0]
    return name if root == "jaxguard" and name in LEVEL else None


def violations(source: str, file: str, own: str, package: str) -> list[str]:
    found = []
    for line, module in imports(ast.parse(source), package):
        part = part_of(module)
        if part is None or part == own:
            continue
        if LEVEL[part] > LEVEL[own] or (LEVEL[part] == LEVEL[own] and LEVEL[own] > 0):
            found.append(f"{file}:{line}: {own} imports {module}")
    return found


def test_every_module_has_a_place() -> None:
    names = {path.stem for path in PACKAGE.iterdir() if path.suffix == ".py" or (path / "__init__.py").exists()}
    assert names - {"__init__"} == set(LEVEL)


def test_imports_go_one_way() -> None:
    found = []
    for path in sorted(PACKAGE.rglob("*.py")):
        relative = path.relative_to(ROOT)
        own = relative.parts[1].removesuffix(".py")
        if own != "__init__":
            package = ".".join(relative.parts[:-1])
            found += violations(path.read_text(encoding="utf-8"), str(relative), own, package)
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    "line",
    [
        "import jaxguard.guard",
        "from jaxguard.guard import Guard",
        "from jaxguard import guard",
        "from .. import guard",
        "from ..guard import Guard",
        "def f():\n    from jaxguard.evaluation.metrics import rates",
    ],
)
def test_the_check_finds_violations_in_every_form(line: str) -> None:
    found = violations(line, "jaxguard/decision/x.py", "decision", "jaxguard.decision")
    assert len(found) == 1
    assert found[0].startswith("jaxguard/decision/x.py:")
    allowed = "import numpy\nfrom . import policy\nfrom jaxguard.types import Step\nfrom ..config import Config"
    assert not violations(allowed, "jaxguard/decision/x.py", "decision", "jaxguard.decision")


def loaded(statement: str, *names: str) -> set[str]:
    """Which of ``names`` a fresh interpreter has loaded after ``statement``."""
    code = f"{statement}\nimport sys\nprint(*[n for n in {names!r} if n in sys.modules])"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT, timeout=120
    )
    return set(done.stdout.split())


def test_the_package_and_its_command_line_load_nothing_heavy() -> None:
    heavy = ("torch", "transformers", "ray", "jax", "flax", "pandas", "matplotlib", "sklearn", "httpx", "jinja2")
    assert loaded("import jaxguard, jaxguard.cli", *heavy) == set()


@pytest.mark.parametrize(
    "modules",
    [
        "jaxguard.traces.convert, jaxguard.traces.drift, jaxguard.traces.splits",
        "jaxguard.features.store, jaxguard.features.texts, jaxguard.features.encoder",
        "jaxguard.evaluation.evaluate, jaxguard.decision.fusion, jaxguard.decision.scored",
        "jaxguard.features.decision_logits, jaxguard.training.lora",
        "jaxguard.baselines.llm_run",
    ],
)
def test_readers_stores_metrics_and_routers_need_no_jax(modules: str) -> None:
    assert loaded(f"import {modules}", "jax", "flax", "torch", "transformers", "peft", "accelerate", "ray") == set()


def test_a_guard_needs_no_torch() -> None:
    assert loaded("import jaxguard.guard, jaxguard.run", "torch", "transformers", "ray", "jax") == {"jax"}


def test_test_files_have_names_of_their_own() -> None:
    """Two files of one name in folders without ``__init__.py`` cannot be collected: both get the bare name."""
    files = sorted((ROOT / "tests").rglob("*.py"))
    bare = [f.name for f in files if f.name != "conftest.py" and not (f.parent / "__init__.py").exists()]
    assert not {name for name in bare if bare.count(name) > 1}
    assert len(bare) > 100


def test_files_keep_their_size_and_there_is_no_utils() -> None:
    sizes = {path: len(path.read_text(encoding="utf-8").splitlines()) for path in PACKAGE.rglob("*.py")}
    assert not [f"{path}: {size} lines" for path, size in sizes.items() if size > 500]
    assert not [path for path in sizes if "util" in path.stem or path.stem in ("helpers", "common", "misc")]
