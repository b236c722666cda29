"""The bundle on disk, scores of archives, and live sessions: equal numbers, and nothing passes by accident."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jaxguard.config import Config, DataConfig, ModelConfig
from jaxguard.decision.calibration import Calibration, CalibrationError, calibrate
from jaxguard.decision.evidence import FusionParams, evidence, trajectory_max
from jaxguard.decision.policy import Mode
from jaxguard.decision.scored import ScoredTrajectory
from jaxguard.features.encoder import Encoder
from jaxguard.features.fingerprint import EncoderFingerprint
from jaxguard.features.store import FeatureStore, MissingTexts
from jaxguard.features.texts import trajectory_texts
from jaxguard.guard import Guard, GuardError, Session
from jaxguard.types import Decision, JaxguardError, Step, Trajectory, Verdict
from jaxguard.world_model.params import Params, flatten, init_params, weights_hash

DIM = 8
CONFIG = Config(
    name="tiny", model=ModelConfig(embed_dim=DIM, deter=8, stoch=2, classes=3, hidden=8, adapter_dim=4, unimix=0.02)
)


class FakeEncoder:
    """A vector from the hash of the text; ``fault`` spoils what it returns."""

    def __init__(self, layer: int = 1):
        self.fingerprint = EncoderFingerprint("fake", "0", layer, "mean", "float32", 16, "windows")
        self.dim = DIM
        self.fault: Callable[[np.ndarray], np.ndarray] = lambda vectors: vectors
        self.seen: list[str] = []

    def encode(self, texts: Sequence[str], on_windows: Any = None, *, live: bool = False) -> np.ndarray:
        self.seen += texts
        return self.fault(np.stack([self.vector(text) for text in texts]))

    def vector(self, text: str) -> np.ndarray:
        if not text:
            return np.zeros(DIM, np.float32)
        seed = hashlib.sha256(text.encode("utf-8")).digest()
        return np.random.default_rng(list(seed)).normal(size=DIM).astype(np.float32)


def make_params() -> Params:
    rng = np.random.default_rng(3)
    shapes = jax.eval_shape(lambda: init_params(CONFIG.model, 0))

    def draw(path: tuple, leaf: jax.ShapeDtypeStruct) -> np.ndarray:
        spread = rng.normal(size=leaf.shape) * (0.3 if path[-1].key != "kernel" else 1.5 * leaf.shape[0] ** -0.5)
        return np.asarray(spread + (path[-1].key == "scale"), np.float32)

    return jax.tree_util.tree_map_with_path(draw, shapes)


def trajectory(number: int, length: int) -> Trajectory:
    steps = tuple(
        Step(f"tool{(number + t) % 3}", {"n": number, "t": [t]}, f"c{t}", f"saw {number} {t}" if t else "")
        for t in range(length)
    )
    metadata = {"domain": "mail" if number % 2 else "bank"}
    return Trajectory(f"t{number}", f"task {number}", steps, unsafe=False, metadata=metadata)


TRAJECTORIES = [trajectory(i, (0, 1, 5, 18, 3)[i % 5]) for i in range(40)]


@pytest.fixture(scope="module")
def params() -> Params:
    return make_params()


@pytest.fixture(scope="module")
def bare(params: Params) -> Guard:
    return Guard(CONFIG, params, FakeEncoder(), provenance={"data": ["a"], "seconds": 1.5})


def thresholds(guard: Guard, **changes: Any) -> Calibration:
    """Thresholds that the guard's own trajectories cross now and then."""
    by_position = {position: risks for position, _, risks in guard.risks(TRAJECTORIES)}
    risks = np.concatenate([by_position[i] for i in range(len(TRAJECTORIES))])
    lengths = [len(t) for t in TRAJECTORIES]
    fused = evidence(risks[:, 0], risks[:, 1], lengths, FusionParams()).fused
    options: dict[str, Any] = {
        "alpha_hold": 0.45, "alpha_block": 0.3, "fusion": FusionParams(), "weights": guard.weights,
        "encoder": guard.encoder.fingerprint.short, "groups": [t.metadata["domain"] for t in TRAJECTORIES],
        "group_key": "domain",
    }  # fmt: skip
    return calibrate(trajectory_max(risks[:, 0], lengths), trajectory_max(fused, lengths), **options | changes)


@pytest.fixture(scope="module")
def calibrated(bare: Guard) -> Guard:
    return bare.calibrated(thresholds(bare))


@pytest.fixture
def guard(calibrated: Guard) -> Guard:
    """The same compiled scorer with an encoder of its own, so that a test may spoil it."""
    own = dataclasses.replace(calibrated, encoder=FakeEncoder())
    own._scorer = calibrated.scorer
    return own


def arrays(record: ScoredTrajectory) -> list[np.ndarray]:
    names = ("hazard", "prefix", "ema", "win", "fused", "decision", "margin")
    return [getattr(record, name) for name in names]


def replay(session: Session, steps: Sequence[Step]) -> list[Verdict]:
    verdicts = []
    for step in steps:
        verdicts.append(session.check(step.observation, step.tool, step.arguments, call_id=step.call_id))
        session.commit(step.call_id)
    return verdicts


def assert_equal(mine: Verdict, theirs: Verdict, atol: float = 1e-6) -> None:
    assert (mine.step, mine.decision, mine.error) == (theirs.step, theirs.decision, theirs.error)
    for name in ("hazard", "prefix", "ema", "win", "fused", "margin"):
        assert getattr(mine, name) == pytest.approx(getattr(theirs, name), abs=atol), name


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


def test_vectors_that_are_not_finite_are_held(guard: Guard) -> None:
    """An infinite observation must not hide in the mode of the latents."""
    bad = TRAJECTORIES[2].steps[2].observation
    sound = guard.encoder.vector  # type: ignore[attr-defined]
    guard.encoder.vector = lambda text: sound(text) * (np.inf if text == bad else 1)  # type: ignore[attr-defined]
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
    assert loaded.weights == calibrated.weights == weights_hash(loaded.params)
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


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda folder: (folder / "guard.json").unlink(), r"no guard\.json there; expected a folder that jaxguard"),
        (edit("guard.json", jaxguard_bundle=2), "version is 2, this jaxguard reads version 1"),
        (edit("guard.json", jaxguard_bundle=...), "version is None"),
        (edit("guard.json", weights=..., provenance=...), "lacks provenance, weights"),
        (edit("guard.json", encoder=5), "encoder in guard.json is 5, expected an object"),
        (edit("guard.json", encoder={"model": "x"}), "encoder fingerprint: got fields"),
        (edit("guard.json", config={"colour": 1}), "colour: unknown key"),
        (cut("guard.json"), "guard.json cannot be read"),
        (lambda folder: (folder / "guard.json").write_text("[]"), "version is None"),
        (lambda folder: (folder / "weights.safetensors").unlink(), "weights.safetensors cannot be read"),
        (cut("weights.safetensors"), "weights.safetensors cannot be read"),
        (
            reweigh(lambda w: w[BIAS].__setitem__(0, 7.0)),
            "weights.safetensors is not the file that guard.json describes",
        ),
        (
            reweigh(lambda w: w[BIAS].__setitem__(0, np.nan)),
            rf"cannot be read \(weights '{BIAS}': 1 values are not finite",
        ),
        (reweigh(lambda w: w.pop(BIAS)), rf"1 missing, first '{BIAS}'"),
        (cut("calibration.json"), "calibration.json cannot be read"),
        (lambda folder: (folder / "calibration.json").write_bytes(b"\xff"), "calibration.json cannot be read"),
        (edit("calibration.json", weights="another"), "weights fingerprint is"),
    ],
)
def test_damaged_bundles_are_named(
    calibrated: Guard, tmp_path: Path, damage: Callable[[Path], object], message: str
) -> None:
    calibrated.save(tmp_path / "guard")
    damage(tmp_path / "guard")
    with pytest.raises(JaxguardError, match=message):
        Guard.load(tmp_path / "guard", FakeEncoder())


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


# Live sessions


@pytest.mark.parametrize("index", [1, 2, 3, 8])
def test_streaming_equals_batch_on_every_field(guard: Guard, index: int) -> None:
    chosen = TRAJECTORIES[index]
    (scored,) = guard.score([chosen])
    verdicts = replay(guard.session(chosen.instruction, chosen.metadata), chosen.steps)
    for t, verdict in enumerate(verdicts):
        assert_equal(verdict, scored.verdict(t))


def test_checking_changes_nothing_and_only_a_commit_moves_the_state(guard: Guard) -> None:
    steps = TRAJECTORIES[2].steps
    plain = replay(guard.session("task 2", TRAJECTORIES[2].metadata), steps)
    session = guard.session("task 2", TRAJECTORIES[2].metadata)
    for t, step in enumerate(steps):
        for _ in range(2):
            session.check("something else", "another tool", {"x": t}, call_id=f"other {t}")
            assert session.check(step.observation, step.tool, step.arguments, call_id=step.call_id) == plain[t]
            assert session.steps == t
        session.commit(step.call_id)
        assert session.steps == t + 1


def test_idempotent_by_call_id(guard: Guard) -> None:
    session = guard.session("task")
    first = session.check("", "read", {"a": 1}, call_id="one")
    seen = len(guard.encoder.seen)  # type: ignore[attr-defined]
    assert session.check("", "read", {"a": 1}, call_id="one") is first
    assert len(guard.encoder.seen) == seen  # type: ignore[attr-defined]
    session.commit("one")
    session.commit("one")
    assert session.steps == 1
    second = session.check("text", "send", {}, call_id="two")
    assert session.check("", "read", {"a": 1}, call_id="one") is first  # a late retry
    session.commit("one")
    assert session.steps == 1
    session.commit("two")
    assert session.check("text", "send", {}, call_id="two") is second


@pytest.mark.parametrize(
    "call", [("x", "read", {"a": 1}), ("", "reads", {"a": 1}), ("", "read", {"a": 2}), ("", "read", {"a": object()})]
)
def test_another_call_under_a_committed_id_is_refused(guard: Guard, call: tuple) -> None:
    session = guard.session("task")
    session.check("", "read", {"a": 1}, call_id="one")
    session.commit("one")
    with pytest.raises(GuardError, match="call id 'one': was committed with another call"):
        session.check(*call, call_id="one")


def test_a_changed_proposal_under_an_open_id_is_scored_anew(guard: Guard) -> None:
    session, fresh = guard.session("task"), guard.session("task")
    session.check("", "read", {"a": 1}, call_id="one")
    changed = session.check("", "delete", {"a": 1}, call_id="one")
    assert changed == fresh.check("", "delete", {"a": 1}, call_id="one")
    session.commit("one")
    fresh.commit("one")
    assert session.check("x", "read", {}) == fresh.check("x", "read", {})


def test_a_proposal_may_be_replaced_by_another_before_the_commit(guard: Guard) -> None:
    session, fresh = guard.session("task"), guard.session("task")
    session.check("", "delete", {"all": True}, call_id="one")
    session.check("", "read", {"a": 1}, call_id="two")
    session.commit("two")
    with pytest.raises(GuardError, match="call id 'one': was not checked since the last commit"):
        session.commit("one")
    fresh.check("", "read", {"a": 1})
    fresh.commit()
    assert session.check("x", "send", {}) == fresh.check("x", "send", {})


def test_committing_needs_a_check(guard: Guard) -> None:
    session = guard.session("task")
    with pytest.raises(GuardError, match="call id 0: was not checked"):
        session.commit()
    session.check("", "read")
    with pytest.raises(GuardError, match="call id 'other': was not checked"):
        session.commit("other")
    session.commit()
    with pytest.raises(GuardError, match="call id 1: was not checked"):
        session.commit()
    assert session.steps == 1


def test_ids_that_look_like_positions_are_ids(guard: Guard) -> None:
    session = guard.session("task")
    session.check("", "read", {}, call_id="1")
    session.commit("1")
    assert session.check("x", "send", {}).step == 1  # position 1, not the call "1"
    session.commit()
    assert session.steps == 2


def test_arguments_are_read_as_the_readers_of_traces_read_them(guard: Guard) -> None:
    def hazard(arguments: Any) -> float:
        return guard.session("task").check("", "send", arguments).hazard

    assert hazard('{"a": 1, "b": "x"}') == hazard({"a": 1, "b": "x"})
    assert hazard("") == hazard(None) == hazard({})
    broken = guard.session("task").check("", "send", '{"a": ')
    assert not broken.error
    assert guard.encoder.seen[-1] == 'send {"a": '  # type: ignore[attr-defined]
    expected = Trajectory("t", "task", (Step("send", None, "0", raw_arguments='{"a": '),))
    assert_equal(broken, next(guard.score([expected])).verdict(0))


def test_surrogates_are_replaced_and_do_not_raise(guard: Guard) -> None:
    verdict = guard.session("task \ud800").check("\udfff", "send\ud800", {"k\udc00": "v\ud83d"}, call_id="\ud800")
    assert not verdict.error
    clean = guard.session("task \ufffd").check("\ufffd", "send\ufffd", {"k\ufffd": "v\ufffd"})
    assert_equal(verdict, clean, atol=0)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((None, "read", {}), "observation: got NoneType, expected text"),
        (("", 3, {}), "tool: got int, expected text"),
        (("", "read", [1]), "arguments: got list, expected a mapping, text or None"),
    ],
)
def test_misuse_is_an_error(guard: Guard, arguments: tuple, message: str) -> None:
    with pytest.raises(GuardError, match=message):
        guard.session("task").check(*arguments)
    with pytest.raises(GuardError, match="instruction: got NoneType"):
        guard.session(None)  # type: ignore[arg-type]


def fail(_: np.ndarray) -> np.ndarray:
    raise RuntimeError("no connection")


FAULTS = {
    "raises": (fail, "RuntimeError: no connection"),
    "nan": (lambda v: v * np.nan, "returned a vector that is not finite"),
    "inf": (lambda v: v + np.inf, "returned a vector that is not finite"),
    "shape": (lambda v: v[:, :3], r"expected \(8,\)"),
    "count": (lambda v: v[:1, :], "not enough values|index"),
}


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("committed", [0, 2])
def test_an_encoder_that_fails_is_held_and_may_recover(guard: Guard, fault: str, committed: int) -> None:
    spoil, message = FAULTS[fault]
    steps = TRAJECTORIES[2].steps
    session = guard.session("task 2", TRAJECTORIES[2].metadata)
    expected = replay(guard.session("task 2", TRAJECTORIES[2].metadata), steps)
    replay(session, steps[:committed])
    guard.encoder.fault = spoil  # type: ignore[attr-defined]
    step = steps[committed]
    verdict = session.check(step.observation, step.tool, step.arguments, call_id="c")
    assert verdict.decision is Decision.HOLD
    assert not verdict.allowed
    assert math.isnan(verdict.margin)
    assert math.isnan(verdict.fused)
    with pytest.raises(GuardError, match=f"could not be scored .*({message})"):
        session.commit("c")
    assert session.steps == committed
    guard.encoder.fault = lambda vectors: vectors  # type: ignore[attr-defined]
    again = session.check(step.observation, step.tool, step.arguments, call_id="c")
    assert again == expected[committed]
    session.commit("c")


def test_arguments_that_are_no_json_are_held(guard: Guard) -> None:
    deep: dict[str, Any] = {}
    for _ in range(100_000):
        deep = {"d": deep}
    for arguments in (deep, {"x": object()}):
        verdict = guard.session("task").check("", "send", arguments)
        assert verdict.decision is Decision.HOLD
        assert "expected a JSON object" in verdict.error
        assert math.isnan(verdict.margin)


def test_observing_lets_calls_pass_and_says_so(guard: Guard) -> None:
    session = guard.session("task 3", TRAJECTORIES[3].metadata, mode=Mode.OBSERVE)
    enforced = replay(guard.session("task 3", TRAJECTORIES[3].metadata), TRAJECTORIES[3].steps)
    for verdict, strict in zip(replay(session, TRAJECTORIES[3].steps), enforced, strict=True):
        assert verdict.decision is strict.decision
        assert verdict.allowed
        assert verdict.observed_only == (strict.decision is not Decision.PASS)
        assert strict.allowed == (strict.decision is Decision.PASS)
    assert {verdict.decision for verdict in enforced} > {Decision.PASS}
    guard.encoder.fault = fail  # type: ignore[attr-defined]
    held = session.check("x", "send", {})
    assert (held.decision, held.observed_only, held.allowed) == (Decision.HOLD, True, True)


def test_metadata_selects_the_thresholds(guard: Guard) -> None:
    calibration = guard.calibration
    assert calibration is not None
    margins = {}
    for domain in ("bank", "mail"):
        verdict = guard.session("task 2", {"domain": domain}).check("", "tool2", {"n": 2, "t": [0]})
        cuts = calibration.for_metadata({"domain": domain})
        margins[domain] = max(verdict.hazard - cuts.block, verdict.fused - cuts.hold)
        if verdict.decision is Decision.PASS:
            assert verdict.margin == pytest.approx(margins[domain], abs=1e-12)
    assert margins["bank"] != margins["mail"]


def test_thoughts_count_only_for_guards_that_read_them(params: Params, calibrated: Guard) -> None:
    reading = Guard(
        dataclasses.replace(CONFIG, data=DataConfig(thought=True)), params, FakeEncoder(), calibrated.calibration
    )
    for guard, differs in ((calibrated, False), (reading, True)):
        verdicts = [guard.session("task").check("", "read", {}, thought=thought) for thought in ("", "I want it")]
        assert (verdicts[0].hazard != verdicts[1].hazard) == differs


def test_sessions_and_threads_do_not_disturb_each_other(guard: Guard) -> None:
    expected = {i: replay(guard.session(f"task {i}"), TRAJECTORIES[i].steps) for i in (2, 3, 7)}
    found: dict[tuple[int, int], list[Verdict]] = {}
    shared = guard.session("task")
    start = threading.Barrier(7)

    def own(i: int, copy: int) -> None:
        start.wait()
        found[i, copy] = replay(guard.session(f"task {i}"), TRAJECTORIES[i].steps)

    def together() -> None:
        start.wait()
        for t in range(5):
            shared.check("x", "read", {"t": t}, call_id=f"call {t}")
            shared.commit(f"call {t}")

    workers = [threading.Thread(target=own, args=(i, copy)) for i in expected for copy in (0, 1)]
    workers.append(threading.Thread(target=together))
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(timeout=120)
    assert not any(worker.is_alive() for worker in workers)
    assert len(found) == 6
    for (i, _), verdicts in found.items():
        assert verdicts == expected[i]
    assert shared.steps == 5


def test_one_session_used_by_several_threads_moves_once_per_call(guard: Guard) -> None:
    session, fresh = guard.session("task"), guard.session("task")
    for t in range(4):
        fresh.check("x", "read", {"t": t}, call_id=f"{t}")
        fresh.commit(f"{t}")
    start = threading.Barrier(4)

    def retry() -> None:
        for t in range(4):
            start.wait()
            session.check("x", "read", {"t": t}, call_id=f"{t}")
            session.commit(f"{t}")

    workers = [threading.Thread(target=retry) for _ in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(timeout=120)
    assert session.steps == 4
    assert session.check("y", "send", {}) == fresh.check("y", "send", {})
