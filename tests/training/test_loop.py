"""Whole stages: resuming bit for bit, being killed, diverging, choosing parameters, and learning."""

from __future__ import annotations

import csv
import dataclasses
import json
import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from training_samples import CONFIG, make, start, with_steps

from jaxguard.config import Config
from jaxguard.training import loop
from jaxguard.training.checkpoints import Checkpoints
from jaxguard.training.episodes import Episodes, TrainingError
from jaxguard.training.loop import Curves, Position, StageResult, batch_stream, train_stage
from jaxguard.world_model.params import CORE, HEADS, POOLED, PREDICTOR, Params, flatten, weights_hash

pytestmark = pytest.mark.usefixtures("compile_cache")
TRAIN, VALIDATION = make(10, seed=1), make(6, seed=2)
ROOT = Path(__file__).resolve().parents[2]


def run(folder: Path, stage: int = 1, config: Config = CONFIG, train: Episodes = TRAIN, **options: Any) -> StageResult:
    return train_stage(config, stage, start(), train, VALIDATION, folder, progress=False, **options)


def same(a: Params, b: Params) -> None:
    for (name, mine), theirs in zip(flatten(a).items(), flatten(b).values(), strict=True):
        assert mine.tobytes() == theirs.tobytes(), name


def last_checkpoint(folder: Path) -> dict[str, np.ndarray]:
    """Every array of the newest checkpoint by path, the optimiser's state included."""
    step = max(int(path.name) for path in (folder / "checkpoints").iterdir() if path.name.isdigit())
    import orbax.checkpoint as ocp

    with ocp.StandardCheckpointer() as reader:
        tree = reader.restore((folder / "checkpoints" / str(step) / "state").absolute())
    return {jax.tree_util.keystr(path): np.asarray(leaf) for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory, compile_cache: Path) -> dict[int, tuple[Path, StageResult]]:
    """Both stages without interruption."""
    folder = tmp_path_factory.mktemp("whole")
    return {stage: (folder / str(stage), run(folder / str(stage), stage)) for stage in (1, 2)}


def test_frozen_parts_keep_their_bytes_and_the_others_move(whole: dict) -> None:
    before = flatten(start())
    for stage, frozen in ((1, {*HEADS, *POOLED}), (2, {*CORE, *PREDICTOR, *POOLED})):
        after = flatten(whole[stage][1].params)
        moved = {name.partition(".")[0] for name in after if after[name].tobytes() != before[name].tobytes()}
        assert moved == set(start()) - frozen


# Three batches an epoch: 1, 4 and 7 stop within one, 3 between two; at 4 a regular checkpoint is due as well.
@pytest.mark.parametrize(
    ("stage", "stops"),
    [
        pytest.param(1, [1, 3], marks=pytest.mark.slow),
        pytest.param(1, [11], marks=pytest.mark.slow),
        pytest.param(2, [3, 4], marks=pytest.mark.slow),
        (2, [7]),
    ],
)
def test_stopping_and_resuming_changes_nothing(whole: dict, tmp_path: Path, stage: int, stops: list[int]) -> None:
    folder, expected = whole[stage]
    done = 0
    for stop in stops:
        done += stop
        assert run(tmp_path, stage, stop_after=stop).steps == done
    result = run(tmp_path, stage)
    assert result.steps == expected.steps == 12
    same(result.params, expected.params)
    assert result.validation_loss == expected.validation_loss
    mine, theirs = last_checkpoint(tmp_path), last_checkpoint(folder)
    assert mine.keys() == theirs.keys()
    assert any("mu" in name for name in mine)
    assert all(mine[name].tobytes() == theirs[name].tobytes() for name in mine)
    assert (tmp_path / "curves.csv").read_bytes() == (folder / "curves.csv").read_bytes()


def test_a_finished_stage_returns_at_once_what_it_returned(whole: dict, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, expected = whole[1]
    monkeypatch.setattr("jaxguard.training.loop.make_batch", None)
    again = run(folder)
    same(again.params, expected.params)
    assert (again.steps, again.validation_loss) == (expected.steps, expected.validation_loss)


def test_curves(whole: dict) -> None:
    for stage, extra in ((1, {"prior_pred", "post_pred", "dyn", "rep", "kl", "post_entropy"}), (2, {"hazard_auroc"})):
        with (whole[stage][0] / "curves.csv").open() as file:
            rows = list(csv.DictReader(file))
        assert [(row["step"], row["split"]) for row in rows] == [
            ("5", "validation"), ("10", "train"), ("10", "validation"), ("12", "train"), ("12", "validation"),
        ]  # fmt: skip
        assert extra <= rows[0].keys()
        assert all(np.isfinite(float(row["loss"])) for row in rows)
        best = min(float(row["loss"]) for row in rows if row["split"] == "validation")
        assert whole[stage][1].validation_loss == best


SCRIPT = """
import functools, os, signal, sys, threading, time
from pathlib import Path
import jax
from training_samples import CONFIG, QUICK, make, start
from jaxguard.training import loop

jax.jit = functools.partial(jax.jit, compiler_options=QUICK)
folder = Path(sys.argv[1])

def train(**options):
    loop.train_stage(CONFIG, 1, start(), make(10, seed=1), make(6, seed=2), folder, progress=False, **options)
"""


def child(code: str, folder: Path, cache: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", SCRIPT + textwrap.dedent(code), str(folder)],
        env=os.environ
        | {
            "PYTHONPATH": f"{ROOT}{os.pathsep}{Path(__file__).parent}",
            "JAX_COMPILATION_CACHE_DIR": str(cache),
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0.2",
        }
        | environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


@pytest.mark.slow
def test_a_killed_process_resumes_to_the_same_end(whole: dict, tmp_path: Path, compile_cache: Path) -> None:
    killed = child(
        """
        make_batch, calls = loop.make_batch, []

        def kill_at_the_seventh(*arguments):
            calls.append(1)
            if len(calls) == 9:  # six training batches, two of the validation at step 5, and this one
                os.kill(os.getpid(), signal.SIGKILL)
            return make_batch(*arguments)

        loop.make_batch = kill_at_the_seventh
        train()
        """,
        tmp_path,
        compile_cache,
    )
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == ["4"]
    result = run(tmp_path)
    same(result.params, whole[1][1].params)
    assert (tmp_path / "curves.csv").read_bytes() == (whole[1][0] / "curves.csv").read_bytes()


@pytest.mark.slow
@pytest.mark.parametrize("delay", [0.0, 0.01, 0.05])
def test_a_process_killed_while_it_writes_a_checkpoint_resumes(
    whole: dict, tmp_path: Path, compile_cache: Path, delay: float
) -> None:
    killed = child(
        f"""
        def watch():
            while not any(path.name.startswith("8") for path in folder.glob("checkpoints/*")):
                pass
            time.sleep({delay})
            os.kill(os.getpid(), signal.SIGKILL)

        threading.Thread(target=watch, daemon=True).start()
        train()
        time.sleep(5)
        """,
        tmp_path,
        compile_cache,
    )
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    same(run(tmp_path).params, whole[1][1].params)
    assert (tmp_path / "curves.csv").read_bytes() == (whole[1][0] / "curves.csv").read_bytes()


@pytest.mark.slow
def test_a_checkpoint_of_another_device_layout_loads(whole: dict, tmp_path: Path, compile_cache: Path) -> None:
    """Stands in for a checkpoint from a GPU: it names a device that this process does not have."""
    written = child(
        """
        assert jax.device_count() == 4
        with jax.default_device(jax.devices()[3]):
            train(stop_after=4)
        """,
        tmp_path,
        compile_cache,
        XLA_FLAGS="--xla_force_host_platform_device_count=4",
    )
    assert written.returncode == 0, written.stderr
    assert "cpu:3" in (tmp_path / "checkpoints" / "4" / "state" / "_sharding").read_text()
    assert jax.device_count() == 1
    result = run(tmp_path)
    for mine, theirs in zip(flatten(result.params).values(), flatten(whole[1][1].params).values(), strict=True):
        np.testing.assert_allclose(mine, theirs, atol=1e-5)


def test_a_loss_that_is_not_finite_names_the_batch_and_leaves_the_checkpoint(whole: dict, tmp_path: Path) -> None:
    run(tmp_path, stop_after=4)
    indices = next(batch_stream(TRAIN, 4, CONFIG.train.seed, Position(1, 1)))[1]
    _, actions, _ = TRAIN.rows[indices[0]]
    sound = TRAIN.table[actions[0]].copy()
    try:
        # The data changed under a run: bypass the digest to see what the loop does with a vector gone bad.
        digest = TRAIN.digest
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Episodes, "digest", property(lambda e: digest if e is TRAIN else VALIDATION_DIGEST))
            TRAIN.table[actions[0]] = np.nan
            with pytest.raises(TrainingError) as caught:
                run(tmp_path)
    finally:
        TRAIN.table[actions[0]] = sound
    message = str(caught.value)
    assert message.startswith("stage 1, step 5: loss is nan")
    assert "Batch 1 of epoch 1" in message
    assert message.endswith(", ".join(TRAIN.ids[i] for i in indices))
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["4"]
    same(run(tmp_path).params, whole[1][1].params)


VALIDATION_DIGEST = VALIDATION.digest


def test_a_checkpoint_of_another_run_is_refused(tmp_path: Path) -> None:
    run(tmp_path, stop_after=1)
    other = dataclasses.replace(CONFIG, stage1=dataclasses.replace(CONFIG.stage1, learning_rate=1e-3))
    with pytest.raises(TrainingError, match="written for another config;"):
        run(tmp_path, config=other)
    with pytest.raises(TrainingError, match="written for another training data;"):
        run(tmp_path, train=make(10, seed=4))
    with pytest.raises(TrainingError, match="written for another validation data;"):
        train_stage(CONFIG, 1, start(), TRAIN, None, tmp_path, progress=False)
    moved = jax.tree.map(lambda v: v + 1, start())
    with pytest.raises(TrainingError, match="written for another starting weights;"):
        train_stage(CONFIG, 1, moved, TRAIN, VALIDATION, tmp_path, progress=False)
    with pytest.raises(TrainingError, match="written for another stage, config;"):
        run(tmp_path, stage=2)


def test_stage_2_needs_a_hazard_to_learn_from(tmp_path: Path) -> None:
    safe = dataclasses.replace(TRAIN, hazard_step=np.full(len(TRAIN), -1))
    with pytest.raises(TrainingError, match=r"no training trajectory has a first hazard step.*unlabelled_hazard"):
        run(tmp_path, stage=2, train=safe)


@pytest.mark.slow
def test_select_chooses_the_best_or_the_last_parameters(
    whole: dict, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Validation losses 1.0, 0.5 and 0.9 at steps 5, 10 and 12."""
    seen: list[Params] = []

    def pretend(params: Params, _: Episodes) -> dict[str, float]:
        seen.append(jax.tree.map(np.array, params))
        return {"loss": [1.0, 0.5, 0.9][(len(seen) - 1) % 3]}

    made = loop.stage_of
    monkeypatch.setattr(loop, "stage_of", lambda *given: dataclasses.replace(made(*given), validate=pretend))
    last = dataclasses.replace(CONFIG, train=dataclasses.replace(CONFIG.train, select="last"))
    best = run(tmp_path / "best")
    same(best.params, seen[1])
    assert best.validation_loss == 0.5
    assert run(tmp_path / "last", config=last, stop_after=11).steps == 11
    result = run(tmp_path / "last", config=last)
    same(result.params, seen[-1])
    assert result.validation_loss == 0.5 + 0.4
    assert weights_hash(result.params) != weights_hash(best.params)


def test_without_validation_the_last_parameters_are_handed_on(tmp_path: Path) -> None:
    result = train_stage(with_steps(CONFIG, 2), 1, start(), TRAIN, None, tmp_path, progress=False)
    assert result.steps == 2
    assert np.isnan(result.validation_loss)
    assert weights_hash(result.params) != weights_hash(start())


def test_both_stages_learn(tmp_path: Path) -> None:
    train, validation = make(64, seed=5), make(64, seed=6)
    config = dataclasses.replace(
        with_steps(CONFIG, 150), train=dataclasses.replace(CONFIG.train, validate_every=50, checkpoint_every=150)
    )
    rows = {}
    params = start()
    for stage in (1, 2):
        folder = tmp_path / str(stage)
        params = train_stage(config, stage, params, train, validation, folder, progress=False).params
        with (folder / "curves.csv").open() as file:
            rows[stage] = list(csv.DictReader(file))
    predicted = [float(row["prior_pred"]) for row in rows[1] if row["split"] == "train"]
    assert np.mean(predicted[-3:]) < 0.8 * np.mean(predicted[:2])
    validated = [row for row in rows[2] if row["split"] == "validation"]
    assert float(validated[-1]["loss"]) < 0.7 * float(rows[2][0]["loss"])
    assert float(validated[-1]["hazard_auroc"]) > 0.95


def test_stream_resumes_where_it_stood() -> None:
    stream = batch_stream(TRAIN, 4, 0, Position())
    walked = [next(stream) for _ in range(8)]
    assert [position for position, _ in walked[:4]] == [Position(0, 1), Position(0, 2), Position(1, 0), Position(1, 1)]
    for i, (position, _) in enumerate(walked[:-1]):
        again = batch_stream(TRAIN, 4, 0, position)
        np.testing.assert_array_equal(next(again)[1], walked[i + 1][1])


def test_tensorboard_without_its_package_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tensorboardX", None)
    config = dataclasses.replace(CONFIG, train=dataclasses.replace(CONFIG.train, tensorboard=True))
    with pytest.raises(TrainingError, match=r"train\.tensorboard: tensorboardX is not installed"):
        run(tmp_path, config=config)


def test_checkpoints_hold_identity_and_versions(whole: dict) -> None:
    meta = json.loads((whole[1][0] / "checkpoints" / "12" / "meta" / "metadata").read_text())
    assert meta["identity"]["config"]["model"]["deter"] == 8
    assert meta["identity"]["starting weights"] == weights_hash(start())
    assert meta["position"] == {"epoch": 4, "batch": 0}
    assert "jax" in meta["versions"]
    assert isinstance(Checkpoints(whole[1][0] / "checkpoints", {}).latest(), int)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"step,loss\nthree,0.5\n", "ValueError: invalid literal for int.*'three'"),
        (b"loss\n0.5\n", "KeyError: 'step'"),
        (b"step,loss\n3\n", "more or fewer cells than the header"),
        (b"step,loss\n3,1,2\n", "more or fewer cells than the header"),
        (b"\xff\xfe", "UnicodeDecodeError"),
    ],
)
def test_damaged_curves_are_named(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "curves.csv"
    path.write_bytes(content)
    with pytest.raises(TrainingError, match=rf"curves\.csv: damaged \(.*{message}.*delete it to go on"):
        Curves(path, 3, tensorboard=False)
    assert path.read_bytes() == content


def test_curves_for_tensorboard_hold_what_the_csv_holds(tmp_path: Path) -> None:
    event_pb2 = pytest.importorskip("tensorboardX.proto.event_pb2")
    curves = Curves(tmp_path / "curves.csv", 0, tensorboard=True)
    curves.add(10, 0, "train", {"loss": 0.5, "grad_norm": 2.0})
    curves.add(10, 0, "validation", {"loss": 0.25})
    curves.close()
    (path,) = (tmp_path / "tensorboard").iterdir()
    content, at, found = path.read_bytes(), 0, set()
    while at < len(content):  # length (8 bytes), its checksum (4), an event, its checksum (4)
        size = int.from_bytes(content[at : at + 8], "little")
        event = event_pb2.Event.FromString(content[at + 12 : at + 12 + size])
        found |= {(value.tag, event.step, value.simple_value) for value in event.summary.value}
        at += 16 + size
    assert found == {("train/loss", 10, 0.5), ("train/grad_norm", 10, 2.0), ("validation/loss", 10, 0.25)}
