"""Plans: what they name, and what they may not say."""

from __future__ import annotations

from pathlib import Path

import pytest

from jaxguard.config import Config
from jaxguard.experiments.plan import FULL, Plan, load_plan
from jaxguard.experiments.runs import run_folder
from jaxguard.experiments.tables import CLAIMS
from jaxguard.settings import ConfigError, override

ROOT = Path(__file__).parents[2]
PLANS = sorted((ROOT / "configs").glob("experiments*.yaml"))


@pytest.mark.parametrize("path", PLANS, ids=lambda p: p.stem)
def test_variants_of_the_plans_differ_in_one_setting_that_is_there(path: Path) -> None:
    plan = load_plan(path, (f"configs={ROOT / 'configs'}",))
    full = override(Config(), plan.base)
    assert len(PLANS) == 2
    for name, overrides in plan.variants.items():
        extra = overrides[len(plan.base) :]
        assert len(extra) == (name != FULL)
        assert (override(Config(), overrides) == full) == (name == FULL)
    settings = {overrides[-1] for name, overrides in plan.variants.items() if name != FULL}
    assert set(CLAIMS) < settings
    assert len(CLAIMS) == 7


@pytest.mark.parametrize("path", PLANS, ids=lambda p: p.stem)
def test_every_set_of_the_plans_has_a_configuration(path: Path) -> None:
    plan = load_plan(path, (f"configs={ROOT / 'configs'}",))
    pairs = [name for entry in plan.transfer for name in entry.split(" -> ")]
    for name in {*plan.sets, *plan.ablated, *pairs}:
        assert plan.config(name).data.trajectories == (f"data/{name}",)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({}, r"sets: got \(\), expected one set or more"),
        ({"sets": ("a",)}, "seeds: .* expected one seed or more"),
        ({"sets": ("a",), "seeds": ("1", "1")}, "seeds: .* expected each seed once"),
        ({"sets": ("a",), "seeds": ("1", "01")}, "seeds: .* expected each seed once"),
        ({"sets": ("a",), "seeds": ("²",)}, "seeds: got '²', expected whole numbers"),
        ({"sets": ("a", "a"), "seeds": ("1",)}, "sets: .* expected each one once"),
        ({"sets": ("a",), "seeds": ("1",), "ablated": ("b", "b"), "ablation_seeds": ("1",)}, "ablated: .* once"),
        ({"sets": ("a",), "seeds": ("1",), "transfer": ("a -> b", "a -> b")}, "transfer: .* expected each one once"),
        ({"sets": ("a",), "seeds": ("one",)}, "seeds: got 'one', expected whole numbers"),
        ({"sets": ("a",), "seeds": ("1",), "ablated": ("a",)}, "ablation_seeds"),
        ({"sets": ("a",), "seeds": ("1",), "ablations": ("nameless",)}, "ablations: got 'nameless'"),
        ({"sets": ("a",), "seeds": ("1",), "ablations": ("full: x=1",)}, "a name other than"),
        ({"sets": ("a",), "seeds": ("1",), "ablations": ("b: x=1", "b: x=2")}, "each name once"),
        ({"sets": ("a",), "seeds": ("1",), "transfer": ("a > b",)}, "transfer: got 'a > b'"),
    ],
)
def test_impossible_plans_are_refused(settings: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Plan(**settings)


def test_a_set_without_configuration_is_named(tmp_path: Path) -> None:
    plan = Plan(configs=str(tmp_path), sets=("nothing",), seeds=("1",))
    with pytest.raises(ConfigError, match=r"set 'nothing': .*nothing\.yaml does not exist"):
        plan.config("nothing")


def test_runs_of_different_names_have_different_folders(tmp_path: Path) -> None:
    folders = {
        run_folder(tmp_path, *names) for names in (("a", "b c", "1"), ("a", "b", "1"), ("b", "b", "1"), ("a", "b", "2"))
    }
    assert len(folders) == 4
