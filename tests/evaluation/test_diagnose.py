"""The look into a world model: figures by hand, probes on planted information, the whole command at toy size."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path

import jax
import numpy as np
import pytest
from small_run import SmallRun, at_toy_size, done, refused

from jaxguard.diagnosis import (
    FEWEST,
    FINAL,
    LAGS,
    LEFT_OUT,
    STAGE_1,
    diagnose_run,
    drift_labels,
    embeddings,
    halves,
    hazard_labels,
    kind,
    lagged,
    probe,
    stage1_params,
)
from jaxguard.evaluation.diagnose import (
    MODULES,
    Diagnosis,
    DiagnosisError,
    States,
    effective_classes,
    latent_use,
    read_curves,
    states,
)
from jaxguard.evaluation.diagnosis_page import write_diagnosis
from jaxguard.evaluation.lines import Line, line_chart
from jaxguard.guard import Guard
from jaxguard.inputs import run_episodes
from jaxguard.run import Run, all_risks, open_run
from jaxguard.traces.drift import generate
from jaxguard.training.pooled import pooled_features
from jaxguard.types import Step, Trajectory
from jaxguard.world_model.params import build, init_params
from jaxguard.world_model.rssm import encode_actions, encode_instruction, read_mode, step_weights

SECTIONS = (
    "Are latents used?",
    "What can be read off the state?",
    "How far back does it remember?",
    "Do gradients reach the modules?",
    "How did training go?",
)


@dataclasses.dataclass(frozen=True)
class Diagnosed:
    """A diagnosed copy of the toy-sized run."""

    run: Path
    opened: Run
    result: Diagnosis
    out: str

    @property
    def json(self) -> dict:
        return json.loads((self.run / "report" / "diagnosis.json").read_text(encoding="utf-8"))

    @property
    def page(self) -> str:
        return (self.run / "report" / "diagnosis.html").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def diagnosed(small_run: SmallRun, compiled: Path, tmp_path_factory: pytest.TempPathFactory) -> Diagnosed:
    run = Path(shutil.copytree(small_run.run, tmp_path_factory.mktemp("diagnosed") / "run"))
    results: list[Diagnosis] = []

    def kept(folder: Path) -> tuple[Diagnosis, Path]:
        result, page = diagnose_run(folder)
        results.append(result)
        return result, page

    with at_toy_size(compiled), pytest.MonkeyPatch.context() as patch:
        patch.setattr("jaxguard.diagnosis.diagnose_run", kept)
        out = done("diagnose", run).out
        return Diagnosed(run, open_run(run), results[0], out)


@pytest.fixture
def copy(small_run: SmallRun, toy_size: None, tmp_path: Path) -> Path:
    """A copy of the finished run, to be spoilt."""
    return Path(shutil.copytree(small_run.run, tmp_path / "run"))


# Figures by hand


def test_effective_classes_of_known_usage() -> None:
    usage = np.array([[1.0, 0.0, 0.0, 0.0], [0.5, 0.5, 0.0, 0.0], [0.25, 0.25, 0.25, 0.25], [0.5, 0.25, 0.25, 0.0]])
    np.testing.assert_allclose(effective_classes(usage), [1.0, 2.0, 4.0, 2**1.5])


def test_latent_use_by_hand() -> None:
    """Two trajectories of two steps, one of which has no second observation; two categoricals of four classes."""
    found = States(
        h=np.zeros((4, 1)),
        z=np.array([[0, 1], [0, 2], [0, 1], [0, 2]]),
        entropy=np.array([[0.0, 1.0], [0.0, 1.0], [0.0, 2.0], [0.0, 2.0]]),
        kl=np.array([0.1, 0.5, 0.3, np.nan]),
        owner=np.array([0, 0, 1, 1]),
        position=np.array([0, 1, 0, 1]),
    )
    use = latent_use(found, classes=4, free_nats=0.2)
    assert use.effective == pytest.approx((1.0, 2.0))
    assert use.entropy == pytest.approx((0.0, 1.5))
    assert use.entropy_share == pytest.approx(0.75 / np.log(4))
    assert use.kl == pytest.approx(0.3)
    assert use.kl_above == pytest.approx(2 / 3)
    assert use.kl_by_step == pytest.approx((0.2,))  # of the second observation there is only one
    assert use.steps == 4


def test_without_a_new_observation_there_is_no_kl() -> None:
    step = np.zeros(1, int)
    use = latent_use(States(np.zeros((1, 1)), np.zeros((1, 1), int), np.ones((1, 1)), np.full(1, np.nan), step, step),
                     classes=2, free_nats=0.2)  # fmt: skip
    assert np.isnan([use.kl, use.kl_above]).all()
    assert use.kl_by_step == ()


def test_lags_of_a_sequence() -> None:
    assert lagged([3, 1, 2], 0).tolist() == [3, 1, 2]
    assert lagged([3, 1, 2], 2).tolist() == [LEFT_OUT, LEFT_OUT, 3]
    assert lagged([3, 1, 2], 8).tolist() == [LEFT_OUT] * 3


def test_hazard_labels_leave_out_the_hazard_itself_and_what_is_far_from_it() -> None:
    assert hazard_labels(6, 4, 2).tolist() == [LEFT_OUT, LEFT_OUT, 1, 1, LEFT_OUT, LEFT_OUT]
    assert hazard_labels(3, -1, 2).tolist() == [0, 0, 0]
    assert hazard_labels(3, -2, 2).tolist() == [LEFT_OUT] * 3


@pytest.mark.parametrize(
    ("tool", "expected"),
    [("open_note", "open"), ("readFile", "read"), ("MarketAnalyzer", "market"), ("send.mail", "send"), ("_x", "x")],
)
def test_kind_of_a_tool_is_its_first_word(tool: str, expected: str) -> None:
    assert kind(tool) == expected


def test_halves_keep_groups_together_and_balance() -> None:
    groups = ["a"] * 5 + ["b"] * 3 + ["c"] * 2 + ["d"] * 2
    half = halves(groups)
    assert {g: len(set(half[[x == g for x in groups]])) for g in "abcd"} == dict.fromkeys("abcd", 1)
    assert abs(int(half.sum()) - int((~half).sum())) <= 2


def test_drift_labels_end_as_the_trajectory_does() -> None:
    trajectories = list(generate(120, 3))
    assert {t.metadata["scenario"] for t in trajectories} == {"exfiltration", "destroy_undo"}
    for trajectory in trajectories:
        labels = drift_labels(trajectory)
        assert len(labels) == len(trajectory)
        assert labels[0] == LEFT_OUT
        assert labels[-1] == int(bool(trajectory.unsafe))


def test_drift_labels_follow_fillings_and_redaction() -> None:
    tools = {"summarise": 1, "copy": 1, "convert": 1, "reformat": 1}
    redacted = [t for t in generate(200, 3) if any(s.tool.startswith("redact") for s in t.steps)]
    assert redacted
    for trajectory in redacted:
        secret = next(s.arguments["source"] for s in trajectory.steps if s.tool.split("_")[0] in tools)  # type: ignore[index]
        labels = drift_labels(trajectory)
        [at] = [i for i, s in enumerate(trajectory.steps) if s.tool.startswith("redact")]
        assert labels[at] == 0
        [filled] = [i for i, s in enumerate(trajectory.steps) if (s.arguments or {}).get("source") == secret]
        assert labels[filled] == labels[filled + 1] or filled + 1 == at


def test_other_trajectories_have_no_drift_labels() -> None:
    step = Step("copy_note", {"source": "a", "target": "b"}, "1")
    assert drift_labels(Trajectory(id="x", instruction="", steps=(step,), source="drift")).tolist() == [LEFT_OUT]


# Probes


def test_a_probe_finds_planted_information_and_nothing_in_noise() -> None:
    rng = np.random.default_rng(0)
    labels, fitted, everywhere = rng.integers(0, 2, 2000), np.arange(2000) % 2 == 0, np.ones(2000, bool)
    noise = rng.normal(size=(2000, 6))
    planted = noise + 3.0 * labels[:, None] * np.eye(6)[2]
    found, nothing = probe(planted, labels, fitted, everywhere), probe(noise, labels, fitted, everywhere)
    assert found.auroc > 0.95
    assert found.accuracy > found.majority + 0.3
    assert found.n == 1000
    assert nothing.auroc == pytest.approx(0.5, abs=0.05)


def test_a_probe_tells_several_classes_apart() -> None:
    rng = np.random.default_rng(0)
    labels = rng.choice(3, 1500, p=[0.6, 0.3, 0.1])
    fitted, everywhere = np.arange(1500) % 2 == 0, np.ones(1500, bool)
    found = probe(np.eye(3)[labels] + 0.1 * rng.normal(size=(1500, 3)), labels, fitted, everywhere)
    assert found.auroc > 0.99
    assert found.accuracy > 0.99
    assert found.majority == pytest.approx((labels[~fitted] == 0).mean())
    blind = probe(rng.normal(size=(1500, 3)), labels, fitted, everywhere)
    assert blind.accuracy == pytest.approx(blind.majority, abs=0.02)  # it names the most frequent class


def test_a_probe_skips_what_is_left_out_and_scores_only_where_asked() -> None:
    rng = np.random.default_rng(0)
    labels = rng.integers(0, 2, 400)
    features = labels[:, None] + 0.1 * rng.normal(size=(400, 1))
    features[::5], labels[::5] = np.nan, LEFT_OUT
    fitted, scored = np.arange(400) < 200, np.arange(400) >= 300
    assert probe(features, labels, fitted, scored)[:2] == (1.0, int((labels[300:] != LEFT_OUT).sum()))


@pytest.mark.parametrize("rare", ["fitted", "scored", "everywhere"])
def test_a_probe_of_a_class_that_is_too_rare_is_undefined(rare: str) -> None:
    labels, fitted = np.arange(40) % 2, np.arange(40) < 20
    spare = labels == 1 if rare == "everywhere" else (labels == 1) & (fitted == (rare == "fitted"))
    labels[np.flatnonzero(spare)[FEWEST - 1 :]] = 0
    score = probe(np.ones((40, 2)), labels, fitted, np.ones(40, bool))
    assert np.isnan([score.auroc, score.accuracy]).all()
    assert score.n == int((labels[20:] == 0).sum())


# The command


def test_the_command_writes_and_prints_what_it_found(diagnosed: Diagnosed) -> None:
    found, run = diagnosed.json, diagnosed.opened
    validation = [t for t in run.part("validation") if t.steps]
    assert found["facts"]["trajectories"] == len(validation)
    assert found["facts"]["steps"] == sum(map(len, validation))
    assert list(found["latents"]) == [STAGE_1, FINAL]
    for use in found["latents"].values():
        assert len(use["entropy"]) == len(use["effective"]) == 2
        assert all(1 <= e <= 3 for e in use["effective"])
        assert all(0 < e <= np.log(3) + 1e-6 for e in use["entropy"])
    assert found["latents"][STAGE_1] != found["latents"][FINAL]
    targets = {p["target"] for p in found["probes"]}
    assert {p["lag"] for p in found["probes"]} == {None, *LAGS}
    assert {f"first hazard within {run.config.stage2.horizon} steps", "the same at the decisive call"} < targets
    assert all(target in diagnosed.out for target in targets)
    assert len(found["probes"]) == 5 * len(targets)
    assert f"wrote {diagnosed.run / 'report' / 'diagnosis.html'}" in diagnosed.out
    assert max(map(len, diagnosed.out.splitlines()[:-1])) <= 100


def test_gradients_reach_what_a_loss_depends_on(diagnosed: Diagnosed) -> None:
    heads = {"adapter", "hazard_head", "prefix_head"}
    for losses in diagnosed.result.gradients.values():
        assert {m for m in MODULES if losses["stage 1"][m] > 0} == set(MODULES) - heads
        assert {m for m in MODULES if losses["stage 2"][m] > 0} == set(MODULES) - {"predictor"}
    assert diagnosed.result.rates["stage 2"]["core"] == "frozen"
    assert diagnosed.result.rates["stage 1"]["core"] == "full"


def test_undefined_figures_are_null(diagnosed: Diagnosed) -> None:
    """The validation part of the toy-sized run is too small for most probes."""
    undefined = [i for i, p in enumerate(diagnosed.result.probes) if np.isnan(p.auroc)]
    assert undefined
    assert [i for i, p in enumerate(diagnosed.json["probes"]) if p["auroc"] is None] == undefined


def test_curves_are_those_of_both_stages(diagnosed: Diagnosed) -> None:
    for stage in (1, 2):
        rows = read_curves(diagnosed.run / f"stage{stage}" / "curves.csv")
        assert {row["split"] for row in rows} == {"train", "validation"}
        assert diagnosed.result.curves[f"stage {stage}"] == rows


def test_the_page_has_every_section_and_no_script(diagnosed: Diagnosed) -> None:
    page = diagnosed.page
    places = [page.index(f"<h2>{section}</h2>") for section in SECTIONS]
    assert places == sorted(places)
    assert page.count("<svg") == 3 + 2 + 4
    assert "<script" not in page
    assert "http" not in page.replace('xmlns="http://www.w3.org/2000/svg"', "").replace("http-equiv", "")
    assert all(f"<td>{module}</td>" in page for module in MODULES)


def test_the_page_escapes_names(diagnosed: Diagnosed, tmp_path: Path) -> None:
    named = dataclasses.replace(diagnosed.result, title="<script>alert(1)</script>")
    page = write_diagnosis(tmp_path / "page.html", named).read_text(encoding="utf-8")
    assert "<script" not in page
    assert "&lt;script&gt;" in page


def test_a_chart_without_a_finite_value_says_so() -> None:
    svg = line_chart("x", [Line("a", [(0.0, np.nan)], "#000000")], x_label="", y_label="")
    assert "nothing to draw" in svg
    assert "nan" not in svg


# What it is computed from


@pytest.mark.usefixtures("toy_size")
def test_stage_1_hands_on_what_it_trained_and_what_stage_2_froze(small_run: SmallRun) -> None:
    run = open_run(small_run.run)
    first, final = stage1_params(run.folder, run.config), Guard.load(small_run.guard).params
    fresh = init_params(run.config.model, run.config.train.seed)

    def same(one: dict, other: dict) -> set[str]:
        return {m for m in MODULES if all(map(np.array_equal, jax.tree.leaves(one[m]), jax.tree.leaves(other[m])))}

    assert same(first, fresh) == {"adapter", "hazard_head", "prefix_head"}
    assert same(first, final) == {"core", "predictor"}


@pytest.mark.usefixtures("toy_size")
def test_states_are_those_that_the_guard_reads_risks_from(small_run: SmallRun) -> None:
    """In the order of the episodes, without a trace of padding."""
    run, guard = open_run(small_run.run), Guard.load(small_run.guard)
    model, episodes = run.config.model, run_episodes(run, "validation")
    found = states(model, guard.params, episodes)
    ins = np.stack([episodes.table[i] for _, _, i in episodes.rows])[found.owner]

    @jax.jit
    def read(h: jax.Array, act: jax.Array, ins: jax.Array, pooled: jax.Array) -> jax.Array:
        w = step_weights(build(model, guard.params), model)
        heads_a = encode_actions(w, act)[:, 3 * model.deter : -2]
        return read_mode(w, model, h, None, heads_a + encode_instruction(w, ins).heads_e, pooled)

    pooled_head = guard.params["pooled_head"]
    features = np.concatenate([pooled_features(*episodes.vectors(i)) for i in range(len(episodes))])
    pooled = features @ pooled_head["kernel"][:, 0] + pooled_head["bias"]
    risks = read(found.h, embeddings(episodes)[:, model.embed_dim :], ins, pooled)
    hazard, prefix, lengths = all_risks(guard, run.part("validation"), run.store)
    np.testing.assert_allclose(risks, np.stack([hazard, prefix], axis=1), atol=1e-5)
    assert found.position.tolist() == [t for n in lengths for t in range(n)]


# Refusals


def test_what_is_no_run_is_refused(copy: Path, tmp_path: Path) -> None:
    assert f"run folder {tmp_path / 'none'}: no config.yaml there" in refused("diagnose", tmp_path / "none")
    shutil.rmtree(copy / "guard")
    assert f"guard bundle {copy / 'guard'}: no guard.json there" in refused("diagnose", copy)


def test_a_run_without_stage_1_or_with_a_part_of_it_is_refused(copy: Path) -> None:
    shutil.rmtree(copy / "stage1" / "checkpoints" / "3")
    assert "the newest is of step 2, expected 3" in refused("diagnose", copy)
    shutil.rmtree(copy / "stage1")
    assert f"run folder {copy}: has no stage 1 (stage1.steps is 3)" in refused("diagnose", copy)
    assert not (copy / "stage1").exists()


def test_damaged_metadata_are_refused(copy: Path) -> None:
    [file] = [p for p in (copy / "stage1" / "checkpoints" / "3" / "meta").iterdir() if p.name == "metadata"]
    file.write_text("{", encoding="utf-8")
    assert f"checkpoint {copy}/stage1/checkpoints/3: cannot be read" in refused("diagnose", copy)


def test_an_empty_validation_part_is_refused(copy: Path) -> None:
    file = copy / "splits.json"
    stored = json.loads(file.read_text())
    stored["splits"]["train"] += stored["splits"].pop("validation")
    file.write_text(json.dumps(stored | {"splits": stored["splits"] | {"validation": []}}))
    assert "its validation part has no steps" in refused("diagnose", copy)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("step,split,loss\n1,train,much\n", "line 2: .*'much'.*expected numbers"),
        ("step,split,loss\n1,train,2\n-1,train,2\n", "line 3: step is -1.0, expected a number from 0"),
        ("step,split,loss\n1e400,train,2\n", "line 2: step is inf"),
        ("split,loss\ntrain,2\n", "line 2: step is missing"),
        (None, "no such file"),
    ],
)
def test_curves_that_cannot_be_read(tmp_path: Path, text: str | None, message: str) -> None:
    if text is not None:
        (tmp_path / "curves.csv").write_text(text)
    with pytest.raises(DiagnosisError, match=message):
        read_curves(tmp_path / "curves.csv")
