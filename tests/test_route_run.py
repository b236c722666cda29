"""``jaxguard route`` from a generated corpus to reports, and what every command refuses."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from small_run import (
    DIM,
    HashEncoder,
    Outcome,
    at_toy_size,
    command,
    done,
    hash_encoder,
    lines,
    no_file_beyond,
    refused,
)

from jaxguard.evaluation.routing import ROUTER
from jaxguard.features.decision_logits import reviewed_snapshots
from jaxguard.features.fingerprint import EncoderFingerprint
from jaxguard.features.store import FeatureStore
from jaxguard.inputs import PARTS, load_trajectories
from jaxguard.route_config import RouteConfig
from jaxguard.router import Router
from jaxguard.traces.jsonl import write_trajectories
from jaxguard.traces.lock import locked
from jaxguard.training.routing import route_stage
from jaxguard.types import Route, Step, Trajectory

SIZES = (
    f"model.embed_dim={DIM}",
    *("model.deter=8", "model.stoch=2", "model.classes=3", "model.hidden=8", "model.adapter_dim=4"),
    *("stage1.steps=2", "route.steps=3", "route.batch_size=16", "train.checkpoint_every=3", "train.validate_every=3"),
    *("corpus.trajectories=200", "evaluation.resamples=20", "routing.least=4", "routing.unseen=[service=mail]"),
    *("data.split.train=0.4", "data.split.validation=0.1", "data.split.calibration=0.3", "data.split.test=0.2"),
)


@dataclasses.dataclass
class Made:
    """A finished run, what it read, and what the commands said."""

    root: Path
    said: dict[str, Outcome]

    @property
    def data(self) -> Path:
        return self.root / "data"

    @property
    def run(self) -> Path:
        return self.root / "run"

    def train(self, out: Path, *more: str) -> tuple[object, ...]:
        inputs = (f"data.trajectories=[{self.data}]", f"data.store={self.root / 'store'}")
        return ("route", "train", "--quiet", "--out", out, *inputs, *SIZES, *more)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory, compiled: Path) -> Any:
    stages: dict[Any, Any] = {}

    def shared(config: RouteConfig) -> Any:
        key = (config.model, config.route, config.train)
        return stages.setdefault(key, None) or stages.update({key: route_stage(config)}) or stages[key]

    with at_toy_size(compiled), pytest.MonkeyPatch.context() as patch:
        patch.setattr("jaxguard.router.load_encoder", hash_encoder)
        patch.setattr("jaxguard.route_run.route_stage", shared)
        found = Made(tmp_path_factory.mktemp("route"), {})
        found.said["generate"] = done("route", "generate", "--out", found.data, *SIZES)
        store = ("--store", found.root / "store")
        guard_sizes = [s for s in SIZES if s.startswith("model.")]
        found.said["embed"] = done("embed", "--quiet", "--trajectories", found.data, *store, *guard_sizes)
        found.said["train"] = done(*found.train(found.run))
        found.said["calibrate"] = done("route", "calibrate", found.run)
        found.said["evaluate"] = done("route", "evaluate", found.run)
        yield found


@pytest.fixture
def copy(made: Made, tmp_path: Path) -> Path:
    """A copy of the finished run, to be spoilt."""
    return Path(shutil.copytree(made.run, tmp_path / "run"))


def splits(run: Path) -> dict[str, list[str]]:
    return json.loads((run / "splits.json").read_text())["splits"]


def test_a_run_folder_holds_everything(made: Made) -> None:
    assert sorted(p.name for p in made.run.iterdir()) == [
        "config.yaml", "report", "route", "router", "splits.json", "stage1"
    ]  # fmt: skip
    assert sorted(p.name for p in (made.run / "report").iterdir()) == ["evaluation.json", "report.html", "routes.csv"]
    router = Router.load(made.run / "router", HashEncoder())
    trajectories = load_trajectories([str(made.data)])
    assert len(trajectories) == 200
    parts = splits(made.run)
    assert router.provenance["trajectories"] == {name: len(ids) for name, ids in parts.items()}
    counts = dict.fromkeys(Route.__members__, 0)
    for i in parts["train"]:
        for review in trajectories[i].metadata["reviews"]:
            counts[review["route"]] += 1
    assert router.provenance["reviews"] == counts
    assert router.routing is not None
    assert router.routing.active == "balanced"
    assert "balanced, in use: tau" in made.said["calibrate"].out
    assert "wrote 200 reviewed trajectories" in made.said["generate"].out


def test_what_is_held_out_is_in_no_part_that_teaches(made: Made) -> None:
    trajectories, parts = load_trajectories([str(made.data)]), splits(made.run)
    held_out = {i for i, t in trajectories.items() if t.metadata["service"] == "mail"}
    assert held_out
    assert set(parts["unseen"]) == held_out
    assert not held_out & {i for name in PARTS for i in parts[name]}
    router = Router.load(made.run / "router", HashEncoder())
    assert "mail" not in router.routing.services["balanced"]  # type: ignore[union-attr]
    figures = json.loads((made.run / "report" / "evaluation.json").read_text())
    rows = {(section["kind"], section["name"]): section["counts"]["rows"] for section in figures["sections"]}
    assert rows["unseen", "service=mail"] == len(held_out)
    assert [count for (kind, _), count in rows.items() if kind == "all"] == [len(parts["test"])]


def test_training_again_changes_nothing_and_keeps_the_thresholds(made: Made, copy: Path) -> None:
    before = (copy / "router" / "router.json").read_bytes()
    assert "calibrate" not in done(*made.train(copy)).out
    assert (copy / "router" / "router.json").read_bytes() == before
    done("route", "evaluate", copy)
    figures = [(run / "report" / "evaluation.json").read_bytes() for run in (copy, made.run)]
    assert figures[0] == figures[1]


def test_the_grid_and_another_place(made: Made, tmp_path: Path, copy: Path) -> None:
    done("route", "evaluate", copy, "--grid")
    figures = json.loads((copy / "report" / "evaluation.json").read_text())
    assert len(figures["grid"]["configs"]) == 4
    other = tmp_path / "other"
    done("route", "generate", "--out", other, "corpus.trajectories=20", "corpus.seed=5")
    for bundle in (made.run, made.run / "router"):
        out = tmp_path / f"out-{bundle.name}"
        said = done("route", "evaluate", bundle, "--trajectories", other, "--out", out).out
        assert "none of them trained this router or chose its thresholds" in said
        assert (out / "report.html").exists()
    message = refused("route", "evaluate", made.run, "--trajectories", made.data, "--out", tmp_path / "x")
    assert "of them trained this router or chose its thresholds" in message
    assert not (tmp_path / "x").exists()


def test_cached_logits(made: Made, tmp_path: Path) -> None:
    """A store made by hand: logits that say the label, and three log-probabilities beside them."""
    trajectories = load_trajectories([str(made.data)])
    fingerprint = EncoderFingerprint("toy", "0", 0, "decision: by hand", "float32", 16, "windows")
    store = FeatureStore.create_or_open(tmp_path / "logits", fingerprint, 6)
    snapshots = list(reviewed_snapshots(trajectories.values()))
    labels = [Route[r["route"]] for t in trajectories.values() for r in t.metadata["reviews"]]
    values = np.eye(3, dtype=np.float32)[labels] * 4
    store.add([shown.to_json() for _, shown in snapshots], np.concatenate([values, values - 5], axis=1))
    arguments = ("route", "cached", "--trajectories", made.data, "--out", tmp_path / "out", *SIZES)
    done(*arguments, "--store", tmp_path / "logits")
    figures = json.loads((tmp_path / "out" / "evaluation.json").read_text())
    sections = {(section["kind"], section["name"]): section for section in figures["sections"]}
    for (kind, _), section in sections.items():
        assert section["models"][ROUTER]["acc"]["value"] == 1.0, kind
    held_out = [t for t in trajectories.values() if t.metadata["service"] == "mail"]
    assert sections["unseen", "service=mail"]["counts"]["rows"] == len(held_out)  # one review each
    assert json.loads((tmp_path / "out" / "routing.json").read_text())["source"] == fingerprint.short
    message = refused(*arguments, "--store", made.root / "store")
    assert "expected 6 of" in message


def test_cached_logits_that_lack_some_are_refused_or_counted(made: Made, tmp_path: Path) -> None:
    trajectories = load_trajectories([str(made.data)])
    fingerprint = EncoderFingerprint("toy", "0", 0, "decision: by hand", "float32", 16, "windows")
    store = FeatureStore.create_or_open(tmp_path / "logits", fingerprint, 6)
    texts = list(dict.fromkeys(shown.to_json() for _, shown in reviewed_snapshots(trajectories.values())))[::2]
    store.add(texts, np.random.default_rng(0).normal(size=(len(texts), 6)).astype(np.float32))
    arguments = ("route", "cached", "--trajectories", made.data, "--store", tmp_path / "logits", *SIZES)
    message = refused(*arguments, "--out", tmp_path / "out")
    assert "reviewed steps of the calibration half have no logits (e.g. service-" in message
    assert not (tmp_path / "out").exists()
    done(*arguments, "--out", tmp_path / "out", "--partial")
    counts = json.loads((tmp_path / "out" / "evaluation.json").read_text())["sections"][0]["counts"]
    assert 0 < counts["unscored"] < counts["rows"]
    before = {p.name: p.read_bytes() for p in (tmp_path / "out").iterdir()}
    assert before.keys() == {"evaluation.json", "report.html", "routes.csv", "routing.json"}
    with no_file_beyond(5_000):  # thresholds fit, figures and page do not
        message = refused(*arguments, "data.split.seed=5", "--out", tmp_path / "out", "--partial")
    assert "report.html, evaluation.json, routes.csv, routing.json cannot be written (File too large)" in message
    assert {p.name: p.read_bytes() for p in (tmp_path / "out").iterdir()} == before


def test_a_report_takes_no_place_of_other_things(made: Made, copy: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    done("route", "generate", "--out", other, "corpus.trajectories=20", "corpus.seed=5")
    (tmp_path / "file").touch()
    for out, message in (
        (copy / "router", "holds 'router.json', which is no part of a report; nothing was overwritten"),
        (copy / "report", "is where a run has its own report"),
        (made.root / "store", "which is no part of a report"),
        (tmp_path / "file", "is a file, expected a folder"),
    ):
        before = sorted(out.iterdir()) if out.is_dir() else []
        given = ("--trajectories", other, "--out", out)
        for command_line in (("evaluate", made.run), ("cached", "--store", made.root / "store")):
            assert message in refused("route", *command_line, *given)
        assert before == (sorted(out.iterdir()) if out.is_dir() else [])
    for _ in range(2):  # its own report is written anew
        done("route", "evaluate", made.run, "--trajectories", other, "--out", tmp_path / "out")


def test_evaluation_only_chooses_no_tau(made: Made, tmp_path: Path) -> None:
    trajectories = load_trajectories([str(made.data)])
    fingerprint = EncoderFingerprint("toy", "0", 0, "decision: by hand", "float32", 16, "windows")
    store = FeatureStore.create_or_open(tmp_path / "logits", fingerprint, 6)
    shown = list(reviewed_snapshots(trajectories.values()))
    texts = list(dict.fromkeys(one.to_json() for _, one in shown))
    store.add(texts, np.random.default_rng(0).normal(size=(len(texts), 6)).astype(np.float32))
    marked = sorted(trajectories)[::2]
    write_trajectories(
        [
            dataclasses.replace(t, metadata={**t.metadata, "evaluation_only": i in marked})
            for i, t in trajectories.items()
        ],
        tmp_path / "data" / "trajectories.jsonl.gz",
    )
    arguments = ("--store", tmp_path / "logits", "--out", tmp_path / "out", *SIZES)
    done("route", "cached", "--trajectories", tmp_path / "data", *arguments)
    sections = json.loads((tmp_path / "out" / "evaluation.json").read_text())["sections"]
    routing = json.loads((tmp_path / "out" / "routing.json").read_text())
    free = len(trajectories) - len({*marked, *(i for i, t in trajectories.items() if t.metadata["service"] == "mail")})
    assert routing["provenance"]["rows"] <= free  # half of those, one review each
    assert sum(s["counts"]["rows"] for s in sections if s["kind"] in ("all", "unseen")) >= len(marked)


def test_traces_of_ones_own_without_a_group_are_resampled_whole_and_every_route_is_told(
    made: Made, tmp_path: Path
) -> None:
    steps = tuple(Step("read_file", {"path": f"notes-{t}.txt"}, f"{t}") for t in range(5))
    reviews = [{"step": t, "route": ("EXECUTE", "ASK")[t % 2]} for t in range(5)]
    own = [Trajectory(f"own,{i}", "Read my notes.", steps, metadata={"reviews": reviews}) for i in range(3)]
    write_trajectories(own, tmp_path / "own.jsonl")
    done("route", "evaluate", made.run, "--trajectories", tmp_path / "own.jsonl", "--out", tmp_path / "out")
    counts = json.loads((tmp_path / "out" / "evaluation.json").read_text())["sections"][0]["counts"]
    assert (counts["rows"], counts["groups"]) == (15, 3)
    shutil.copytree(made.run / "router", tmp_path / "moved")
    arguments = ("--trajectories", tmp_path / "own.jsonl", "--out", tmp_path / "out")
    said = done("route", "evaluate", tmp_path / "moved", *arguments).out
    assert "whether some of them trained this router is not known" in " ".join(said.split())
    told = pd.read_csv(tmp_path / "out" / "routes.csv", keep_default_na=False)
    assert told[["trajectory_id", "step", "tool", "service"]].values.tolist() == [
        [run.id, t, "read_file", ""] for run in own for t in range(5)
    ]
    assert told.review.tolist() == ["EXECUTE", "ASK", "EXECUTE", "ASK", "EXECUTE"] * 3
    router = Router.load(made.run / "router", HashEncoder())
    assert router.routing is not None
    for position, _, logits in router.logits(own):
        mine = told[told.trajectory_id == own[position].id]
        assert mine.route.tolist() == [Route(int(r)).name for r in router.routing.route(logits[:, :3], [""] * 5)]
        np.testing.assert_allclose(mine.tau, router.routing.tau_for())


def test_a_killed_report_is_no_obstacle(made: Made, tmp_path: Path) -> None:
    for name in ("report.html.partial", "report.html.partial.partial", "routes.csv.partial"):
        lines(tmp_path / "out" / name, "half")
    arguments = ("--trajectories", tmp_path / "own.jsonl", "--out", tmp_path / "out")
    reviews = [{"step": 0, "route": "ASK"}]
    own = Trajectory("own", "Read.", (Step("read_file", {"path": "a.txt"}, "0"),), metadata={"reviews": reviews})
    write_trajectories([own], tmp_path / "own.jsonl")
    done("route", "evaluate", made.run, *arguments)
    lines(tmp_path / "out" / "report.html.old", "mine")
    assert "holds 'report.html.old'" in refused("route", "evaluate", made.run, *arguments)


def test_a_service_that_is_no_text_is_named(made: Made, tmp_path: Path) -> None:
    first = next(iter(load_trajectories([str(made.data)]).values()))
    odd = dataclasses.replace(first, id="odd", metadata={**first.metadata, "service": ["x"]})
    write_trajectories([odd], tmp_path / "data" / "trajectories.jsonl.gz")
    message = refused("route", "evaluate", made.run, "--trajectories", tmp_path / "data", "--out", tmp_path / "out")
    assert "trajectory 'odd': metadata service: got list, expected text or None" in message


def test_nothing_to_ask_a_model_about_is_said(tmp_path: Path) -> None:
    write_trajectories([Trajectory("t", "go", (Step("act", {}, "0"),))], tmp_path / "data" / "trajectories.jsonl.gz")
    message = refused(
        "route", "logits", "--trajectories", tmp_path / "data", "--model", tmp_path, "--store", tmp_path / "s"
    )
    assert "--trajectories: got 1, none with a review, expected some" in message


def test_a_router_of_other_reviews_is_refused(made: Made, tmp_path: Path) -> None:
    data, run = tmp_path / "data", tmp_path / "run"
    shutil.copytree(made.data, data)
    shutil.copytree(made.run, run)
    (run / "config.yaml").write_text((run / "config.yaml").read_text().replace(str(made.data), str(data)))
    record = json.loads((run / "router" / "router.json").read_text())
    record["provenance"]["inputs"] = {
        str(data) if name == str(made.data) else name: value for name, value in record["provenance"]["inputs"].items()
    }
    (run / "router" / "router.json").write_text(json.dumps(record))
    done("route", "evaluate", run)
    trajectories = list(load_trajectories([str(data)]).values())
    first = trajectories[0]
    (review,) = first.metadata["reviews"]
    other = {**review, "route": "ASK" if review["route"] != "ASK" else "REFUSE"}
    trajectories[0] = dataclasses.replace(first, metadata={**first.metadata, "reviews": [other]})
    shutil.rmtree(data)
    write_trajectories(trajectories, data / "trajectories.jsonl.gz")
    for name in ("evaluate", "calibrate"):
        message = refused("route", name, run)
        assert f"{data}: not what the router in {run} was trained on" in message
        assert "`jaxguard route train` again" in message


def test_evaluation_only_trains_and_selects_nothing(made: Made, tmp_path: Path) -> None:
    trajectories = load_trajectories([str(made.data)])
    for name in ("train", "validation"):
        marked = splits(made.run)[name][0]
        own = dataclasses.replace(
            trajectories[marked], metadata={**trajectories[marked].metadata, "evaluation_only": True}
        )
        data = tmp_path / name
        write_trajectories(
            [own if t.id == marked else t for t in trajectories.values()], data / "trajectories.jsonl.gz"
        )
        message = refused(*made.train(tmp_path / "run", f"data.trajectories=[{data}]"))
        assert f"{name} part: 1 trajectories are for evaluation only (e.g. {marked!r}), expected none" in message
        assert not (tmp_path / "run").exists()


def test_reviews_that_cannot_teach_are_refused_before_anything_is_written(made: Made, tmp_path: Path) -> None:
    trajectories = load_trajectories([str(made.data)])
    last = splits(made.run)["test"][0]
    for name, change, message in (
        ("one", {i: "ASK" for i in trajectories}, "reviews are ASK, expected two routes at least"),
        ("broken", {last: "MAYBE"}, f"trajectory {last!r}: reviews 0 route: got 'MAYBE', expected one of EXECUTE"),
    ):
        data = [
            dataclasses.replace(
                t, metadata={**t.metadata, "reviews": [{**t.metadata["reviews"][0], "route": change[i]}]}
            )
            if i in change
            else t
            for i, t in trajectories.items()
        ]
        write_trajectories(data, tmp_path / name / "trajectories.jsonl.gz")
        assert message in refused(*made.train(tmp_path / "run", f"data.trajectories=[{tmp_path / name}]"))
        assert not (tmp_path / "run").exists()


def test_a_split_file_must_keep_out_what_is_held_out(made: Made, tmp_path: Path) -> None:
    record = json.loads((made.run / "splits.json").read_text())
    moved = record["splits"]["unseen"].pop()
    record["splits"]["train"].append(moved)
    (tmp_path / "splits.json").write_text(json.dumps(record))
    message = refused(*made.train(tmp_path / "run", f"data.split.file={tmp_path / 'splits.json'}"))
    assert f"train holds {moved!r}, which routing.unseen holds out (service=mail)" in message


def test_errors_are_clear(made: Made, tmp_path: Path, copy: Path) -> None:
    for arguments, expected in (
        (made.train(tmp_path / "a", "routing.unseen=[service=none]"), "got 'service=none', which no trajectory has"),
        (made.train(tmp_path / "a", "routing.unseen=[mail]"), "routing.unseen: got 'mail', expected field=value"),
        (made.train(tmp_path / "a", "stage2.steps=3"), "stage2: unknown key"),
        (made.train(copy, "route.steps=4"), "was made with another configuration (route.steps)"),
        (("route", "calibrate", tmp_path / "none"), "expected a folder that `jaxguard route train` wrote"),
        (("route", "calibrate", copy, "route.steps=1"), "expected routing.* here"),
        (("route", "calibrate", copy, "routing.unseen=[]"), "expected routing.* here"),
        (("route", "evaluate", copy, "--out", tmp_path), "--store, --out: are for --trajectories"),
        (("route", "evaluate", copy, "--trajectories", made.data), "--out: got none"),
        (("route", "evaluate", copy, "--trajectories", made.data, "--grid"), "--grid: is for a run's own test part"),
        (("evaluate", copy), "corpus: unknown key"),
    ):
        assert expected in refused(*arguments)
    assert not (tmp_path / "a").exists()
    (copy / "router" / "routing.json").write_text("{")
    assert "delete it and run `jaxguard route calibrate` again" in refused("route", "calibrate", copy)
    (copy / "router" / "routing.json").unlink()
    assert "router: has no thresholds yet; run `jaxguard route calibrate` first" in refused("route", "evaluate", copy)
    done("route", "calibrate", copy)  # the way out that the message names
    assert command("route", "evaluate", copy).status == 0


def test_one_process_at_a_time_trains_or_calibrates(made: Made, copy: Path, tmp_path: Path) -> None:
    before = {path: path.read_bytes() for path in copy.rglob("*") if path.is_file()}
    with locked(copy):
        for words in (made.train(copy), (*made.train(copy), "--fresh"), ("route", "calibrate", copy)):
            assert "another process is writing there" in refused(*words)
    assert {path: path.read_bytes() for path in copy.rglob("*") if path.is_file()} == before
    assert "another process" not in done("route", "calibrate", copy).err
