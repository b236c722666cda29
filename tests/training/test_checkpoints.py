"""Checkpoints come back byte for byte, and refuse what they were not written for."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxguard.training.checkpoints import Checkpoints
from jaxguard.training.episodes import TrainingError
from jaxguard.training.state import TrainState
from jaxguard.versions import versions

IDENTITY = {"stage": 1, "config": {"rate": 2e-4}, "training data": "abc"}
META = {"position": {"epoch": 3, "batch": 2}, "best_loss": None}
RNG = np.random.default_rng(0)


def state(step: int, width: int = 400) -> TrainState:
    """One array small enough to be stored in line, one that gets a file of its own."""
    params = {"core": {"bias": jnp.arange(3.0), "kernel": jnp.asarray(RNG.normal(size=(300, width)), jnp.float32)}}
    return TrainState(params, {"mu": jax.tree.map(jnp.negative, params)}, jnp.asarray(step, jnp.int32))


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, TrainState]:
    folder = tmp_path_factory.mktemp("checkpoints") / "stage"
    checkpoints = Checkpoints(folder, IDENTITY)
    saved = state(4)
    checkpoints.save(saved, jax.tree.map(lambda v: v + 1, saved.params), META)
    checkpoints.close()
    return folder, saved


def test_round_trip_is_exact(written: tuple[Path, TrainState]) -> None:
    folder, saved = written
    checkpoints = Checkpoints(folder, IDENTITY)
    assert checkpoints.latest() == 4
    restored, best, meta = checkpoints.restore(state(0))
    for mine, theirs in zip(jax.tree.leaves(restored), jax.tree.leaves(saved), strict=True):
        assert mine.dtype == theirs.dtype
        np.testing.assert_array_equal(mine, theirs)
    np.testing.assert_array_equal(best["core"]["bias"], [1.0, 2.0, 3.0])
    assert meta["position"] == META["position"]
    assert meta["best_loss"] is None
    assert meta["versions"] == versions()
    assert {"jaxguard", "jax", "flax", "optax", "orbax", "numpy"} <= versions().keys()


def test_what_cannot_be_written_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise ValueError("RESOURCE_EXHAUSTED: No space left on device\nand more")

    checkpoints = Checkpoints(tmp_path / "stage", IDENTITY)
    monkeypatch.setattr(checkpoints._manager, "save", full)
    expected = r"stage/4: cannot be written \(RESOURCE_EXHAUSTED: No space left on device\); is the disk full"
    with pytest.raises(TrainingError, match=expected):
        checkpoints.save(state(4, 2), {}, META)
    checkpoints.close()


def test_relative_folders_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    checkpoints = Checkpoints(Path("here"), IDENTITY)
    checkpoints.save(state(1, 2), {}, META)
    assert (tmp_path / "here" / "1").is_dir()


def test_the_newest_two_are_kept(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, IDENTITY)
    assert checkpoints.latest() is None
    for step in (2, 4, 6):
        checkpoints.save(state(step, 2), {}, META)
    assert checkpoints.latest() == 6
    assert sorted(path.name for path in tmp_path.iterdir()) == ["4", "6"]
    with pytest.raises(TrainingError, match="none found"):
        Checkpoints(tmp_path / "other", IDENTITY).restore(state(0))


@pytest.mark.parametrize(
    ("identity", "named"),
    [
        (IDENTITY | {"config": {"rate": 1e-3}}, "another config;"),
        (IDENTITY | {"training data": "abd", "stage": 2}, "another stage, training data;"),
        ({"stage": 1, "config": {"rate": 2e-4}}, "another training data;"),
    ],
)
def test_another_identity_is_refused(written: tuple[Path, TrainState], identity: dict, named: str) -> None:
    with pytest.raises(TrainingError, match=rf"stage/4: was written for {named}"):
        Checkpoints(written[0], identity).restore(state(0))


def test_another_shape_is_refused(written: tuple[Path, TrainState]) -> None:
    with pytest.raises(TrainingError, match=r"cannot be read: .*shape"):
        Checkpoints(written[0], IDENTITY).restore(state(0, width=401))


def each(pattern: str, change: Callable[[Path], object]) -> Callable[[Path], None]:
    def mutate(folder: Path) -> None:
        found = [path for path in folder.rglob(pattern) if path.is_file()]
        assert found
        for path in found:
            change(path)

    return mutate


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 0x10
    path.write_bytes(data)


def edit_meta(**changes: object) -> Callable[[Path], None]:
    def change(path: Path) -> None:
        record = json.loads(path.read_text()) | changes
        path.write_text(json.dumps({name: value for name, value in record.items() if value is not ...}))

    return each("meta/metadata", change)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize(
    "mutate",
    [
        pytest.param(each("ocdbt.process_0/d/*", truncate), id="arrays cut off"),
        pytest.param(each("ocdbt.process_0/d/*", flip), id="arrays altered"),
        pytest.param(each("d/*", Path.unlink), id="arrays lost"),
        pytest.param(each("manifest.ocdbt", truncate), id="manifest cut off"),
        pytest.param(each("_METADATA", truncate), id="structure cut off"),
        pytest.param(each("meta/metadata", truncate), id="meta cut off"),
        pytest.param(edit_meta(digest=...), id="meta incomplete"),
        pytest.param(lambda folder: shutil.rmtree(folder / "4" / "meta"), id="meta lost"),
        pytest.param(lambda folder: shutil.rmtree(folder / "4" / "state"), id="state lost"),
        pytest.param(lambda folder: (folder / "9").mkdir(), id="empty folder in its place"),
    ],
)
def test_damage_is_a_training_error_that_names_the_checkpoint(
    written: tuple[Path, TrainState], tmp_path: Path, mutate: Callable[[Path], object]
) -> None:
    folder = tmp_path / "copy"
    shutil.copytree(written[0], folder)
    mutate(folder)
    with pytest.raises(TrainingError, match=r"checkpoint .*copy/\d: "):
        Checkpoints(folder, IDENTITY).restore(state(0))


@pytest.mark.parametrize(
    ("mutate", "message"),
    [
        (each("meta/metadata", lambda path: path.write_text("[1]") and None), "metadata are list, expected an object"),
        (edit_meta(position=..., best_loss=...), "metadata lack best_loss, position"),
        (edit_meta(position={"epoch": 1}), "position is {'epoch': 1}, expected an epoch and a batch"),
        (edit_meta(position={"epoch": 1, "batch": -2}), "position is .*-2.*, expected an epoch and a batch"),
        (edit_meta(position=3), "position is 3, expected"),
        (edit_meta(best_loss="low"), "best_loss is 'low'"),
        (edit_meta(identity=[]), r"identity \[\], expected"),
    ],
)
def test_metadata_that_cannot_be_resumed_from_are_named(
    written: tuple[Path, TrainState], tmp_path: Path, mutate: Callable[[Path], object], message: str
) -> None:
    folder = tmp_path / "copy"
    shutil.copytree(written[0], folder)
    mutate(folder)
    with pytest.raises(TrainingError, match=rf"checkpoint .*copy/4: .*{message}"):
        Checkpoints(folder, IDENTITY).restore(state(0))


def test_every_single_altered_array_file_is_noticed(written: tuple[Path, TrainState], tmp_path: Path) -> None:
    files = sorted(path.relative_to(written[0]) for path in written[0].rglob("ocdbt.process_0/d/*"))
    assert any((written[0] / path).stat().st_size > 300 * 400 for path in files)  # an array beyond the checksums
    noticed = []
    for number, path in enumerate(files):
        folder = tmp_path / str(number)
        shutil.copytree(written[0], folder)
        flip(folder / path)
        try:
            restored, best, _ = Checkpoints(folder, IDENTITY).restore(state(0))
        except TrainingError:
            noticed.append(path)
        else:  # an index that nothing reads: what came back must be right
            np.testing.assert_array_equal(restored.params["core"]["kernel"], written[1].params["core"]["kernel"])
            np.testing.assert_array_equal(best["core"]["bias"], [1.0, 2.0, 3.0])
    assert noticed
