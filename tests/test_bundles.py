"""The router's bundle: written and read with every part, and what does not belong together is refused by name."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from guard_samples import DIM, FakeEncoder, bare_guard
from route_samples import TRAJECTORIES, bare_router, routed_router
from safetensors.numpy import load_file, save_file

from jaxguard.guard import Guard, GuardError
from jaxguard.router import Router, RouterError
from jaxguard.world_model.params import flatten

pytestmark = pytest.mark.usefixtures("toy_size")


def test_save_and_load(tmp_path: Path) -> None:
    path, router = tmp_path / "deep" / "router", routed_router()
    router.save(path)
    assert sorted(p.name for p in path.iterdir()) == ["router.json", "routing.json", "weights.safetensors"]
    assert len({p.stat().st_mode for p in path.iterdir()}) == 1  # who may read one file may read all
    loaded = Router.load(path, FakeEncoder())
    assert (loaded.config, loaded.routing, loaded.source) == (router.config, router.routing, router.source)
    assert loaded.provenance == router.provenance
    mine, theirs = flatten(loaded.params), flatten(router.params)
    assert mine.keys() == theirs.keys()
    assert all(mine[name].tobytes() == theirs[name].tobytes() for name in mine)
    for (_, _, a), (_, _, b) in zip(loaded.logits(TRAJECTORIES[:4]), router.logits(TRAJECTORIES[:4]), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5)  # either may have been compiled with fewer optimisations
    description = json.loads((path / "router.json").read_text())
    assert {"jaxguard", "jax", "flax", "numpy"} <= description["versions"].keys()
    assert description["jaxguard_router"] == 2


def test_saving_replaces_a_router_and_no_guard(tmp_path: Path) -> None:
    routed_router().save(tmp_path / "router")
    bare_router().save(tmp_path / "router")
    assert Router.load(tmp_path / "router", FakeEncoder()).routing is None
    bare_guard().save(tmp_path / "guard")
    with pytest.raises(RouterError, match=r"^router bundle .*guard: exists and is not a bundle; name another folder"):
        bare_router().save(tmp_path / "guard")
    Guard.load(tmp_path / "guard", FakeEncoder())
    with pytest.raises(RouterError, match=r"no router\.json there"):
        Router.load(tmp_path / "guard", FakeEncoder())
    with pytest.raises(GuardError, match=r"no guard\.json there"):
        Guard.load(tmp_path / "router", FakeEncoder())


def test_what_a_killed_writer_left_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "here" / "router"
    bare_router().save(path)
    other = path.with_name(".router-v2-abcdefgh") / "made"  # of another bundle
    routed_router().save(other)
    rename = Path.rename

    def killed(self: Path, target: Path) -> Path:
        if self.name == "made":
            shutil.copytree(path.parent, tmp_path / "killed")  # what the disk holds at that moment
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", killed)
    routed_router().save(path)
    found = tmp_path / "killed" / "router"
    with pytest.raises(RouterError, match="one whose writing was interrupted lies in") as caught:
        Router.load(found, FakeEncoder())
    kept = Path(str(caught.value).split("lies in ")[1].split(",")[0])
    assert str(caught.value).endswith(f"move it to {found}")
    rename(kept, found)
    assert Router.load(found, FakeEncoder()).routing is not None


def test_a_run_is_told_from_its_bundle(tmp_path: Path) -> None:
    bare_router().save(tmp_path / "router")
    with pytest.raises(RouterError, match=rf"that is a run, its bundle is {tmp_path / 'router'}"):
        Router.load(tmp_path, FakeEncoder())


def edit(name: str, **changes: Any) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        record = json.loads((folder / name).read_text()) | changes
        (folder / name).write_text(json.dumps({k: v for k, v in record.items() if v is not ...}))

    return change


def cut(name: str) -> Callable[[Path], object]:
    return lambda folder: (folder / name).write_bytes((folder / name).read_bytes()[:-9])


def reweigh(change: Callable[[dict[str, np.ndarray]], object]) -> Callable[[Path], None]:
    def apply(folder: Path) -> None:
        weights = {name: array.copy() for name, array in load_file(folder / "weights.safetensors").items()}
        change(weights)
        save_file(weights, folder / "weights.safetensors")

    return apply


def with_route(**changes: object) -> Callable[[Path], None]:
    """Other settings of the stage in the configuration of the bundle."""

    def change(folder: Path) -> None:
        config = json.loads((folder / "router.json").read_text())["config"]
        config["route"] |= changes
        edit("router.json", config=config)(folder)

    return change


BIAS = "head.mlp.out.bias"


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (edit("router.json", jaxguard_router=3), r"version is 3, .* reads version 2; .*`jaxguard route train`"),
        (edit("router.json", jaxguard_router=...), "version is None"),
        (edit("router.json", weights=..., routing=...), r"router\.json lacks routing, weights"),
        (edit("router.json", provenance=[]), r"provenance in router\.json is \[\], expected an object"),
        (edit("router.json", config={"stage2": {}}), "stage2: unknown key"),
        (cut("router.json"), r"router\.json cannot be read"),
        (lambda folder: (folder / "weights.safetensors").unlink(), r"weights\.safetensors cannot be read"),
        (cut("weights.safetensors"), r"weights\.safetensors cannot be read"),
        (reweigh(lambda w: w[BIAS].__setitem__(0, 7.0)), "do not belong together"),
        (
            reweigh(lambda w: w[BIAS].__setitem__(0, np.nan)),
            r"cannot be read \(weights 'mlp.out.bias': 1 values are not",
        ),
        (reweigh(lambda w: w.pop(BIAS)), r"cannot be read \(weights: 1 missing, first 'mlp.out.bias'"),
        (reweigh(lambda w: w.update(tail=np.ones(1))), "got 'tail', expected names that start with world or head"),
        (with_route(memory=False), "do not belong together"),
        (with_route(recurrence=False), "do not belong together"),
        (cut("routing.json"), r"routing\.json cannot be read"),
        (lambda folder: (folder / "routing.json").write_bytes(b"\xff"), r"routing\.json cannot be read"),
        (
            edit("routing.json", taus={"balanced": 0.0}),
            r"routing\.json is not the file .*; delete it and run `jaxguard route calibrate` again",
        ),
        (edit("router.json", routing=None), r"routing\.json is not the file"),
    ],
)
def test_damaged_bundles_are_named(tmp_path: Path, damage: Callable[[Path], object], message: str) -> None:
    folder = tmp_path / "router"
    routed_router().save(folder)
    damage(folder)
    with pytest.raises(RouterError, match=rf"^router bundle {folder}: .*{message}"):
        Router.load(folder, FakeEncoder())


def test_thresholds_of_another_router_are_refused_with_a_right_digest_too(tmp_path: Path) -> None:
    folder = tmp_path / "router"
    routed_router().save(folder)
    edit("routing.json", source="another")(folder)
    edit("router.json", routing=hashlib.sha256((folder / "routing.json").read_bytes()).hexdigest())(folder)
    with pytest.raises(RouterError, match=rf"^router bundle {folder}: routing: fingerprint of the logits is"):
        Router.load(folder, FakeEncoder())


def test_a_bundle_whose_thresholds_are_gone_routes_nothing_and_can_be_calibrated_again(tmp_path: Path) -> None:
    folder = tmp_path / "router"
    routed_router().save(folder)
    (folder / "routing.json").unlink()
    loaded = Router.load(folder, FakeEncoder())
    with pytest.raises(RouterError, match=r"has no thresholds; run `jaxguard route calibrate` first"):
        loaded.session("task")
    assert routed_router().routing is not None
    loaded.routed(routed_router().routing).save(folder)  # type: ignore[arg-type]
    assert Router.load(folder, FakeEncoder()).routing == routed_router().routing


def test_a_wrong_encoder_is_refused(tmp_path: Path) -> None:
    bare_router().save(tmp_path / "router")
    with pytest.raises(RouterError, match=r"made for another encoder than the one at hand \(layer: 1 != 5\)"):
        Router.load(tmp_path / "router", FakeEncoder(layer=5))
    narrow = FakeEncoder()
    narrow.dim = DIM - 1
    with pytest.raises(RouterError, match=r"model\.embed_dim is 8, but the encoder .* makes 7 values per text"):
        Router.load(tmp_path / "router", narrow)
