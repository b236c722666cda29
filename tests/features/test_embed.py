"""Filling a store: counts, chunks, and a kill in the middle."""

from __future__ import annotations

import dataclasses
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from jaxguard.features.embed import embed
from jaxguard.features.encoder import OnWindows
from jaxguard.features.fingerprint import EncoderFingerprint
from jaxguard.features.grounding import route_texts
from jaxguard.features.minilm import MiniLMEncoder
from jaxguard.features.shards import FeatureStoreError
from jaxguard.features.store import FeatureStore
from jaxguard.features.texts import trajectory_texts
from jaxguard.types import Step, Trajectory


class LengthEncoder:
    """Two values per text: its length and its first character; remembers what it was asked."""

    fingerprint = EncoderFingerprint("length", "0", 0, "none", "float32", 1, "none")
    dim = 2

    def __init__(self) -> None:
        self.calls: list[list[str]] = []

    def encode(self, texts: Sequence[str], on_windows: OnWindows | None = None, *, live: bool = False) -> np.ndarray:
        self.calls.append(list(texts))
        if on_windows is not None:
            on_windows(len(texts))
        return np.array([[len(text), ord(text[0]) if text else 0] for text in texts], np.float32)


def _trajectory(number: int) -> Trajectory:
    return Trajectory(
        id=str(number),
        instruction=f"task {number % 3}",
        steps=tuple(
            Step(
                tool="read",
                arguments={"page": number * 2 + step},
                call_id=str(step),
                observation="" if step == 0 else f"page {number} of the ledger, " * (1 + number % 4),
            )
            for step in range(2)
        ),
        final_observation=f"closing balance {number}",
    )


def _trajectories(count: int) -> list[Trajectory]:
    return [_trajectory(number) for number in range(count)]


def test_every_text_is_stored_once_and_counted(tmp_path: Path) -> None:
    encoder = LengthEncoder()
    store = FeatureStore.create_or_open(tmp_path, encoder.fingerprint, 2)
    store.add(["task 1", "unrelated"], [[6, ord("t")], [9, ord("u")]])
    trajectories = _trajectories(10)
    report = embed(iter(trajectories), store, encoder)
    # 3 tasks, "", 10 observations, 10 final observations, 20 actions; 6 texts per trajectory.
    assert (report.trajectories, report.texts, report.unique) == (10, 60, 44)
    assert (report.already_there, report.embedded, report.windows) == (1, 43, 43)
    assert report.texts_per_s > 0
    for trajectory in trajectories:
        for text in trajectory_texts(trajectory).unique():
            np.testing.assert_array_equal(store.get([text])[0, 0], len(text))
    again = embed(trajectories, store, encoder)
    assert (again.unique, again.already_there, again.embedded) == (44, 44, 0)
    assert len(encoder.calls) == 1


def test_chunks_bound_what_is_held_and_become_shards(tmp_path: Path) -> None:
    encoder, progress = LengthEncoder(), []
    store = FeatureStore.create_or_open(tmp_path, encoder.fingerprint, 2)
    embed(_trajectories(50), store, encoder, chunk_texts=20, progress=lambda *state: progress.append(state))
    assert max(map(len, encoder.calls)) <= 20 + 6
    assert len(list(tmp_path.glob("*.parquet"))) == len(encoder.calls) > 5
    assert progress[-1] == (len(store), len(store))
    assert progress == sorted(progress)
    flat = [text for call in encoder.calls for text in call]
    assert len(flat) == len(set(flat))


def test_an_interrupted_embed_ends_with_the_same_store(tmp_path: Path) -> None:
    class Interrupted(LengthEncoder):
        def encode(
            self, texts: Sequence[str], on_windows: OnWindows | None = None, *, live: bool = False
        ) -> np.ndarray:
            if len(self.calls) == 3:
                raise KeyboardInterrupt
            return super().encode(texts, on_windows, live=live)

    trajectories, encoder = _trajectories(50), LengthEncoder()
    cut = FeatureStore.create_or_open(tmp_path / "cut", encoder.fingerprint, 2)
    with pytest.raises(KeyboardInterrupt):
        embed(trajectories, cut, Interrupted(), chunk_texts=20)
    resumed = FeatureStore.create_or_open(tmp_path / "cut", encoder.fingerprint, 2)
    before = len(resumed)
    assert before > 0
    report = embed(trajectories, resumed, encoder, chunk_texts=33)
    whole = FeatureStore.create_or_open(tmp_path / "whole", encoder.fingerprint, 2)
    embed(trajectories, whole, encoder)
    texts = list(dict.fromkeys(text for one in trajectories for text in trajectory_texts(one).unique()))
    np.testing.assert_array_equal(resumed.get(texts), whole.get(texts))
    assert len(resumed) == len(whole) == len(texts) == before + report.embedded


def test_thought_changes_the_action_texts(tmp_path: Path) -> None:
    encoder = LengthEncoder()
    store = FeatureStore.create_or_open(tmp_path, encoder.fingerprint, 2)
    step = Step(tool="a", arguments={}, call_id="0", thought="hmm")
    embed([Trajectory(id="t", instruction="i", steps=(step,))], store, encoder, thought=True)
    assert "hmm\na {}" in store
    assert "a {}" not in store


def test_reviewed_trajectories_bring_what_a_router_reads(tmp_path: Path) -> None:
    encoder = LengthEncoder()
    store = FeatureStore.create_or_open(tmp_path, encoder.fingerprint, 2)
    steps = (
        Step("look", {"at": "vase"}, "0"),
        Step("drop", {"item": "vase"}, "1", observation="The lamp works. The vase is sold."),
    )
    memory = {"memory": "I sing. Ask me about the vase."}
    plain = Trajectory(id="plain", instruction="tidy", steps=steps, metadata=memory)
    reviewed = dataclasses.replace(plain, id="r", metadata={**memory, "reviews": [{"step": 1, "route": "ASK"}]})
    # tidy, three observations of which two are "", two actions
    first = embed([plain], store, encoder)
    assert (first.texts, first.unique, first.embedded) == (6, 5, 5)
    assert memory["memory"] not in store
    # memory, two pieces of evidence of which one is "", twice the same note
    second = embed([reviewed], store, encoder)
    assert (second.texts, second.unique, second.already_there, second.embedded) == (11, 8, 5, 3)
    assert set(encoder.calls[-1]) == {memory["memory"], "The vase is sold.", "Ask me about the vase."}
    known = route_texts(reviewed)
    assert all(text in store for text in (known.memory, *known.evidence, *known.notes))


def test_another_encoder_is_refused_before_anything_is_read(tmp_path: Path) -> None:
    encoder = LengthEncoder()
    other = dataclasses.replace(encoder.fingerprint, layer=5)
    store = FeatureStore.create_or_open(tmp_path, other, 2)
    with pytest.raises(FeatureStoreError, match="layer: 5 != 0"):
        embed(_trajectories(1), store, encoder)
    assert not encoder.calls


_RUN = """
import sys
sys.path.insert(0, sys.argv[2])
from test_embed import _trajectories
from jaxguard.features.embed import embed
from jaxguard.features.minilm import MiniLMEncoder
from jaxguard.features.store import FeatureStore
encoder = MiniLMEncoder(layer=1, max_tokens=24, batch_tokens=96)
store = FeatureStore.create_or_open(sys.argv[1], encoder.fingerprint, encoder.dim)
embed(_trajectories(4000), store, encoder, chunk_texts=50)
"""


@pytest.mark.slow
def test_a_killed_embed_ends_with_the_same_store(tmp_path: Path) -> None:
    killed = tmp_path / "killed"
    process = subprocess.Popen([sys.executable, "-c", _RUN, str(killed), str(Path(__file__).parent)])
    deadline = time.monotonic() + 60
    while len(list(killed.glob("shard-*"))) < 3 and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.005)
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    encoder = MiniLMEncoder(layer=1, max_tokens=24, batch_tokens=96)
    resumed = FeatureStore.create_or_open(killed, encoder.fingerprint, encoder.dim)
    before = len(resumed)
    assert before >= 100
    trajectories = _trajectories(before // 4 + 50)
    report = embed(trajectories, resumed, encoder, chunk_texts=77)
    assert report.embedded > 0
    assert report.already_there > 0
    whole = FeatureStore.create_or_open(tmp_path / "whole", encoder.fingerprint, encoder.dim)
    embed(trajectories, whole, encoder)
    texts = list(dict.fromkeys(text for one in trajectories for text in trajectory_texts(one).unique()))
    np.testing.assert_array_equal(resumed.get(texts), whole.get(texts))
    assert len(resumed) == len(whole) == len(texts)


_MEASURE = """
import resource, sys
sys.path.insert(0, sys.argv[2])
from test_embed import LengthEncoder, _trajectory
from jaxguard.features.embed import embed
from jaxguard.features.store import FeatureStore
encoder = LengthEncoder()
encoder.calls = type("Forget", (), {"append": lambda self, call: None})()
store = FeatureStore.create_or_open(sys.argv[1], encoder.fingerprint, encoder.dim)
stream = map(_trajectory, range(int(sys.argv[3])))
print(embed(stream, store, encoder).embedded, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
"""


@pytest.mark.slow
def test_memory_does_not_grow_with_the_number_of_trajectories(tmp_path: Path) -> None:
    peaks = []
    for count in (2_000, 20_000):
        command = [sys.executable, "-c", _MEASURE, str(tmp_path / str(count)), str(Path(__file__).parent), str(count)]
        run = subprocess.run(command, capture_output=True, text=True, check=True)
        embedded, peak_kib = map(int, run.stdout.split())
        assert embedded > 4 * count
        peaks.append(peak_kib)
    # The index takes 24 bytes per text: 2 MB here.
    assert peaks[1] - peaks[0] < 20 * 1024
