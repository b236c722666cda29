"""The bundle on disk and scores of archives."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from guard_samples import CONFIG, DIM, TRAJECTORIES, FakeEncoder, bare_guard, calibrated_guard, fresh_guard, thresholds
from safetensors.numpy import load_file, save_file

from jaxguard.decision.calibration import CalibrationError
from jaxguard.decision.scored import ScoredTrajectory
from jaxguard.features.encoder import Encoder
from jaxguard.features.store import FeatureStore, MissingTexts
from jaxguard.features.texts import trajectory_texts
from jaxguard.guard import Guard, GuardError
from jaxguard.types import Decision, JaxguardError, Step, Trajectory
from jaxguard.world_model.params import Params, flatten, weights_hash


@pytest.fixture
def bare() -> Guard:
    return bare_guard()


@pytest.fixture
def calibrated() -> Guard:
    return calibrated_guard()


@pytest.fixture
def params() -> Params:
    return bare_guard().params


@pytest.fixture
def guard() -> Guard:
    return fresh_guard()


def arrays(record: ScoredTrajectory) -> list[np.ndarray]:
    names = ("hazard", "prefix", "ema", "win", "fused", "decision", "margin")
    return [getattr(record, name) for name in names]


# Scores of archives


def test_the_fake_is_an_encoder() -> None:
    assert isinstance(FakeEncoder(), Encoder)


def test_scores_come_in_order_with_decisions(guard: Guard) -> None:
    scored = list(guard.score(TRAJECTORIES))
    assert [record.id for record in scored] == [t.id for t in TRAJECTORIES]
    assert [len(record) for record in scored] == [len(t) for t in TRAJECTORIES]
    decisions = np.concatenate([record.decision for record in scored])
    assert {int(d) for d in decisions} == {0, 1, 2}
    for record, t in zip(scored, TRAJECTORIES, strict=True):
        cut = guard.calibration.for_metadata(t.metadata)  # type: ignore[union-attr]
        assert (record.lambda_block, record.lambda_hold) == (cut.block, cut.hold)


def test_scores_depend_on_each_text(guard: Guard) -> None:
    """A wrong index of a vector would show here: one changed word, one changed step."""
    base = TRAJECTORIES[2]
    changed = dataclasses.replace(
        base, steps=(*base.steps[:3], dataclasses.replace(base.steps[3], tool="other"), *base.steps[4:])
    )
    one, two = guard.score([base, changed])
    assert one.hazard[:3].tolist() == two.hazard[:3].tolist()
    assert (one.hazard[3:] != two.hazard[3:]).all()
    (alone,) = guard.score([base])
    np.testing.assert_allclose(alone.hazard, one.hazard, atol=1e-6)


def test_a_store_gives_the_scores_of_the_encoder(guard: Guard, tmp_path: Path) -> None:
    texts = sorted({text for t in TRAJECTORIES for text in trajectory_texts(t).unique()})
    encoder = FakeEncoder()
    store = FeatureStore.create_or_open(tmp_path / "store", encoder.fingerprint, DIM)
    store.add(texts, encoder.encode(texts))
    for mine, theirs in zip(guard.score(TRAJECTORIES, store), guard.score(TRAJECTORIES), strict=True):
        for a, b in zip(arrays(mine), arrays(theirs), strict=True):
            np.testing.assert_allclose(a, b, atol=1e-6)
    with pytest.raises(MissingTexts, match=r"2 of 3 texts have no vector, the first is number 1: 't \{\}'"):
        list(guard.score([Trajectory("x", "an unknown task", (Step("t", {}, "0"),))], store))


def test_a_store_of_another_encoder_is_refused(guard: Guard, tmp_path: Path) -> None:
    store = FeatureStore.create_or_open(tmp_path / "store", FakeEncoder(layer=2).fingerprint, DIM)
    with pytest.raises(GuardError, match=r"feature store .*layer: 2 != 1"):
        list(guard.score(TRAJECTORIES, store))


@pytest.mark.parametrize("factor", [np.inf, 1e20])
def test_vectors_that_no_model_can_read_are_held(guard: Guard, factor: float) -> None:
    """An infinite observation must not hide in the mode of the latents, nor a huge one in a norm."""
    bad = TRAJECTORIES[2].steps[2].observation
    sound = guard.encoder.vector  # type: ignore[attr-defined]
    guard.encoder.vector = lambda text: sound(text) * np.float32(factor if text == bad else 1)  # type: ignore[attr-defined]
    spoiled, other = guard.score([TRAJECTORIES[2], TRAJECTORIES[3]])
    assert np.isfinite(spoiled.fused[:2]).all()
    assert np.isnan(spoiled.fused[2:]).all()
    assert (spoiled.decision[2:] == Decision.HOLD).all()
    assert np.isnan(spoiled.margin[2:]).all()
    assert np.isfinite(other.fused).all()


def test_without_thresholds_there_are_risks_but_no_decisions(bare: Guard) -> None:
    assert next(bare.risks(TRAJECTORIES[1:2]))[2].shape == (1, 2)
    with pytest.raises(GuardError, match="has no thresholds"):
        list(bare.score(TRAJECTORIES))
    with pytest.raises(GuardError, match="has no thresholds"):
        bare.session("task")


def test_what_does_not_belong_together_is_refused(bare: Guard, params: Params) -> None:
    with pytest.raises(CalibrationError, match="encoder fingerprint"):
        bare.calibrated(thresholds(bare, encoder="another"))
    with pytest.raises(CalibrationError, match="weights fingerprint"):
        bare.calibrated(thresholds(bare, weights="another"))
    wide = dataclasses.replace(CONFIG, model=dataclasses.replace(CONFIG.model, embed_dim=9))
    with pytest.raises(GuardError, match=r"model\.embed_dim is 9, but the encoder fake layer 1 .* makes 8 values"):
        Guard(wide, params, FakeEncoder())
    with pytest.raises(GuardError, match="precision: got 'float16', expected one of float32, bfloat16"):
        Guard(CONFIG, params, FakeEncoder(), precision="float16")


# The bundle


def test_save_and_load(calibrated: Guard, tmp_path: Path) -> None:
    path = tmp_path / "deep" / "guard"
    calibrated.save(path)
    assert sorted(p.name for p in path.iterdir()) == ["calibration.json", "guard.json", "weights.safetensors"]
    assert [p.name for p in path.parent.iterdir()] == ["guard"]
    loaded = Guard.load(path, FakeEncoder())
    assert loaded.config == calibrated.config
    assert loaded.calibration == calibrated.calibration
    assert loaded.provenance == calibrated.provenance
    assert loaded.weights == calibrated.weights
    assert weights_hash(loaded.params) == weights_hash(calibrated.params)
    assert flatten(loaded.params).keys() == flatten(calibrated.params).keys()
    for mine, theirs in zip(loaded.score(TRAJECTORIES), calibrated.score(TRAJECTORIES), strict=True):
        for a, b in zip(arrays(mine), arrays(theirs), strict=True):
            np.testing.assert_array_equal(a, b)
    description = json.loads((path / "guard.json").read_text())
    assert {"jaxguard", "jax", "flax", "numpy"} <= description["versions"].keys()
    assert description["encoder"] == calibrated.encoder.fingerprint.to_dict()


def test_saving_replaces_a_bundle_and_nothing_else(bare: Guard, calibrated: Guard, tmp_path: Path) -> None:
    calibrated.save(tmp_path / "guard")
    bare.save(tmp_path / "guard")
    assert Guard.load(tmp_path / "guard", FakeEncoder()).calibration is None
    assert [p.name for p in tmp_path.iterdir()] == ["guard"]
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("years of work")
    with pytest.raises(GuardError, match="exists and is not a bundle"):
        bare.save(tmp_path / "mine")
    assert (tmp_path / "mine" / "thesis.txt").exists()
    odd = dataclasses.replace(bare, provenance={"x": object()})
    with pytest.raises(GuardError, match=r"provenance: .*expected JSON-like values"):
        odd.save(tmp_path / "guard")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["guard", "mine"]
    Guard.load(tmp_path / "guard", FakeEncoder())


def edit(name: str, **changes: Any) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        record = json.loads((folder / name).read_text())
        record.update(changes)
        (folder / name).write_text(json.dumps({k: v for k, v in record.items() if v is not ...}))

    return change


def cut(name: str) -> Callable[[Path], None]:
    return lambda folder: (folder / name).write_bytes((folder / name).read_bytes()[:-9]) and None


def reweigh(change: Callable[[dict[str, np.ndarray]], object]) -> Callable[[Path], None]:
    def apply(folder: Path) -> None:
        weights = {name: array.copy() for name, array in load_file(folder / "weights.safetensors").items()}
        change(weights)
        save_file(weights, folder / "weights.safetensors")

    return apply


BIAS = "prior.out.bias"


def resize(deter: float) -> Callable[[Path], None]:
    """Another size of the model in the configuration of the bundle."""

    def change(folder: Path) -> None:
        config = json.loads((folder / "guard.json").read_text())["config"]
        config["model"]["deter"] = deter
        edit("guard.json", config=config)(folder)

    return change


def as_dtype(name: str, size: int) -> Callable[[Path], None]:
    """The weights as zeros of a dtype that NumPy may lack."""

    def change(folder: Path) -> None:
        shapes = {key: array.shape for key, array in load_file(folder / "weights.safetensors").items()}
        header, end = {}, 0
        for key, shape in shapes.items():
            start, end = end, end + size * int(np.prod(shape))
            header[key] = {"dtype": name, "shape": shape, "data_offsets": [start, end]}
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)
        (folder / "weights.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + bytes(end))

    return change


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda folder: (folder / "guard.json").unlink(), r"no guard\.json there, expected a bundle that jaxguard"),
        (
            edit("guard.json", jaxguard_bundle=1),
            "version is 1, this jaxguard reads version 4; delete it and make it anew",
        ),
        (edit("guard.json", jaxguard_bundle=4.0), r"version is 4\.0"),
        (edit("guard.json", jaxguard_bundle=...), "version is None"),
        (edit("guard.json", weights=..., calibration=...), "lacks calibration, weights"),
        (edit("guard.json", encoder=5), "encoder in guard.json is 5, expected an object"),
        (edit("guard.json", encoder={"model": "x"}), "encoder fingerprint: got fields"),
        (edit("guard.json", config={"colour": 1}), "colour: unknown key"),
        (cut("guard.json"), "guard.json cannot be read"),
        (
            lambda folder: (folder / "guard.json").write_text("[" * 100_000),
            r"guard\.json cannot be read \(RecursionError",
        ),
        (lambda folder: (folder / "calibration.json").write_text("[" * 100_000), r"calibration\.json cannot be read"),
        (resize(1e30), r"model\.deter: got 1e\+30 \(float\), expected int"),
        (resize(10**30), r"model\.deter: got an integer of 100 bits"),
        (resize(10**9), r"model\.deter: got 1000000000, expected at most 65,536"),
        (as_dtype("BF16", 2), "weights.safetensors and guard.json do not belong together"),
        (as_dtype("F8_E4M3", 1), r"weights\.safetensors cannot be read"),
        (as_dtype("U64", 8), "weights.safetensors and guard.json do not belong together"),
        (lambda folder: (folder / "guard.json").write_text("[]"), "version is None"),
        (lambda folder: (folder / "weights.safetensors").unlink(), "weights.safetensors cannot be read"),
        (cut("weights.safetensors"), "weights.safetensors cannot be read"),
        (
            reweigh(lambda w: w[BIAS].__setitem__(0, 7.0)),
            "weights.safetensors and guard.json do not belong together",
        ),
        (
            reweigh(lambda w: w[BIAS].__setitem__(0, np.nan)),
            rf"cannot be read \(weights '{BIAS}': 1 values are not finite",
        ),
        (reweigh(lambda w: w.pop(BIAS)), rf"1 missing, first '{BIAS}'"),
        (cut("calibration.json"), "calibration.json cannot be read"),
        (lambda folder: (folder / "calibration.json").write_bytes(b"\xff"), "calibration.json cannot be read"),
        (
            edit("calibration.json", weights="another"),
            r"calibration\.json is not the file that guard\.json was written",
        ),
        (
            edit("calibration.json", fusion={"beta": 0.7, "window": 3, "w_hazard": 1e-9, "w_ema": 1e-9, "w_win": 1e-9}),
            r"calibration\.json is not the file .*; delete it and run `jaxguard calibrate` again",
        ),
        (edit("guard.json", calibration=None), r"calibration\.json is not the file"),
        (edit("guard.json", calibration=..., x=1), "lacks calibration"),
    ],
)
def test_damaged_bundles_are_named(
    calibrated: Guard, tmp_path: Path, damage: Callable[[Path], object], message: str
) -> None:
    calibrated.save(tmp_path / "guard")
    damage(tmp_path / "guard")
    with pytest.raises(GuardError, match=rf"^guard bundle {tmp_path / 'guard'}: .*{message}"):
        Guard.load(tmp_path / "guard", FakeEncoder())


def test_thresholds_of_another_guard_are_refused_with_a_right_digest_too(calibrated: Guard, tmp_path: Path) -> None:
    calibrated.save(tmp_path / "guard")
    edit("calibration.json", weights="another")(tmp_path / "guard")
    digest = hashlib.sha256((tmp_path / "guard" / "calibration.json").read_bytes()).hexdigest()
    edit("guard.json", calibration=digest)(tmp_path / "guard")
    with pytest.raises(GuardError, match=rf"^guard bundle {tmp_path / 'guard'}: calibration: weights fingerprint is"):
        Guard.load(tmp_path / "guard", FakeEncoder())


def test_a_bundle_whose_thresholds_are_gone_passes_nothing(calibrated: Guard, tmp_path: Path) -> None:
    calibrated.save(tmp_path / "guard")
    (tmp_path / "guard" / "calibration.json").unlink()
    with pytest.raises(GuardError, match="has no thresholds"):
        Guard.load(tmp_path / "guard", FakeEncoder()).session("task")


@pytest.mark.parametrize("failing", ["made", "guard"])
@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), KeyboardInterrupt()])
def test_a_save_that_fails_keeps_the_old_bundle(
    bare: Guard,
    calibrated: Guard,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    failing: str,
    error: BaseException,
) -> None:
    calibrated.save(tmp_path / "guard")
    rename = Path.rename

    def fail_once(self: Path, target: Path) -> Path:
        if self.name == failing:
            raise error
        return rename(self, target)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", fail_once)
        with pytest.raises(type(error)):
            bare.save(tmp_path / "guard")
    assert [path.name for path in tmp_path.iterdir()] == ["guard"]
    assert Guard.load(tmp_path / "guard", FakeEncoder()).calibration == calibrated.calibration


def test_missing_folder_and_wrong_encoder(calibrated: Guard, tmp_path: Path) -> None:
    with pytest.raises(GuardError, match=r"guard bundle .*nowhere: no guard\.json there"):
        Guard.load(tmp_path / "nowhere", FakeEncoder())
    calibrated.save(tmp_path / "guard")
    with pytest.raises(GuardError, match=r"made for another encoder than the one at hand \(layer: 1 != 5\)"):
        Guard.load(tmp_path / "guard", FakeEncoder(layer=5))


def test_load_makes_the_encoder_that_the_configuration_names(
    calibrated: Guard, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calibrated.save(tmp_path / "guard")
    asked = []
    monkeypatch.setattr("jaxguard.guard.load_encoder", lambda settings: asked.append(settings) or FakeEncoder())
    assert Guard.load(tmp_path / "guard").encoder.dim == DIM
    assert asked == [CONFIG.encoder]


def test_thresholds_are_bound_to_how_the_weights_are_used(calibrated: Guard) -> None:
    scaled = dataclasses.replace(
        calibrated.config, model=dataclasses.replace(calibrated.config.model, adapter_scale=1.0)
    )
    thinking = dataclasses.replace(calibrated.config, data=dataclasses.replace(calibrated.config.data, thought=True))
    for config in (scaled, thinking):
        with pytest.raises(JaxguardError, match="weights fingerprint is"):
            dataclasses.replace(calibrated, config=config)
