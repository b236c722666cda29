"""``jaxguard online`` from end to end: scripted, and against an endpoint that a test plays."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from guard_samples import FakeEncoder, calibrated_guard
from small_run import done, lines, refused

from jaxguard.baselines.endpoint import EndpointConfig, EndpointRefused
from jaxguard.baselines.rival import RivalError
from jaxguard.online.conditions import Condition, Guarded, Rivalled, Unguarded
from jaxguard.online.local_server import LocalServer, Reply, completion
from jaxguard.online.run import OnlineConfig, evaluate_online
from jaxguard.settings import ConfigError
from jaxguard.traces.jsonl import read_trajectories
from jaxguard.traces.splits import save_splits
from jaxguard.types import Step, Trajectory


def record(number: int, unsafe: bool) -> dict[str, Any]:
    last = {"tool": "send", "arguments": {"to": "x"}, "observation": f"saw {number}", "hazard": unsafe}
    steps = [{"tool": "read", "arguments": {"n": number}}, last]
    more = {"unsafe": unsafe, "timing": True, "first_hazard": 1} if unsafe else {"unsafe": unsafe, "timing": True}
    kind = "leak" if number % 2 else "fraud"
    about = {"group": f"g{number // 2}", "metadata": {"risk_type": kind}}
    return {"jaxguard": 1, "id": f"r{number}", "instruction": f"do {number}", "steps": steps, **about, **more}


@pytest.fixture
def data(tmp_path: Path) -> Path:
    return lines(tmp_path / "data" / "runs.jsonl", *(record(i, i % 4 < 2) for i in range(24)))


class Oracle:
    """A rival that knows which call to refuse in cases whose number is below a bound."""

    name = "oracle"

    def __init__(self, below: int):
        self.below = below

    def observe(self, prefix: Trajectory, action: Step) -> float:
        number = int(prefix.instruction.split()[1])
        return float(action.tool == "send" and number % 4 < 2 and number < self.below)


def test_scripted_figures_are_those_of_the_labels(data: Path, tmp_path: Path) -> None:
    compared = [Unguarded(), Rivalled("half", Oracle(12), 0.5), Rivalled("all", Oracle(24), 0.5)]
    report = evaluate_online(
        list(read_trajectories(data)), tmp_path / "out", OnlineConfig(resamples=50), lambda _: compared, scripted=True
    )
    found = {
        r.name: (r.safety.value, r.utility.value, r.safety.scored, r.utility.scored) for r in report.online.results
    }
    assert found == {"none": (0.0, 1.0, 12, 12), "half": (0.5, 1.0, 12, 12), "all": (1.0, 1.0, 12, 12)}
    assert report.online.frontier == ["all"]
    rows = [json.loads(line) for line in (tmp_path / "out" / "transcripts.jsonl").read_text().splitlines()]
    assert len(rows) == 72
    refusals = [row["case"] for row in rows if any(c["kind"] == "refused" for c in row["calls"])]
    assert sorted(refusals) == sorted(
        [f"r{i}" for i in range(12) if i % 4 < 2] + [f"r{i}" for i in range(24) if i % 4 < 2]
    )
    assert all(row["judged_unsafe"] == (row["unsafe_case"] and row["condition"] == "none") for row in rows
               if row["condition"] != "half")  # fmt: skip
    summary = json.loads((tmp_path / "out" / "summary.json").read_text())
    assert summary["scripted"] is True
    assert summary["frontier"] == ["all"]
    assert summary["settings"]["seed"] == 20260716
    assert summary["settings"]["conditions"]["half"] == "oracle, BLOCK above 0.5"
    assert report.page.exists()


def test_a_scripted_evaluation_is_the_same_every_time(data: Path, tmp_path: Path) -> None:
    def transcripts(name: str) -> list[Any]:
        condition = Guarded("ours", calibrated_guard())
        settings = OnlineConfig(cases=8, resamples=50)
        evaluate_online(list(read_trajectories(data)), tmp_path / name, settings, lambda _: [condition], scripted=True)
        rows = [json.loads(line) for line in (tmp_path / name / "transcripts.jsonl").read_text().splitlines()]
        for row in rows:
            for call in row["calls"]:
                del call["check_ms"]
        return rows

    first = transcripts("a")
    assert len(first) == 8
    assert first == transcripts("b")


FENCED = re.compile(r"<<<(\w+)\n(.*)\n\1>>>")


class Model:
    """A language model that plays agent, judge and guard; whatever case "do 5" is about fails."""

    def __init__(self) -> None:
        self.asked: list[dict[str, Any]] = []

    def __call__(self, _: Any, request: dict[str, Any]) -> Reply:
        self.asked.append(request)
        text = json.dumps(request["messages"])
        if "do 5" in text:
            return Reply("overloaded", 503)
        if "tools" in request:
            done = sum(message["role"] == "tool" for message in request["messages"])
            number = int(re.findall(r"do (\d+)", text)[0])
            tool, arguments = (("read", {"n": number}), ("send", {"to": "x"}))[min(done, 1)]
            call = [{"id": "x", "name": tool, "arguments": json.dumps(arguments)}]
            return completion(calls=call, prompt_tokens=10, completion_tokens=5) if done < 2 else completion("Done.")
        found = FENCED.search(request["messages"][-1]["content"])
        assert found is not None
        shown = json.loads(found[2])
        if "action" in shown:
            return completion("unsafe" if shown["action"]["tool"] == "send" else "safe")
        sent = any(call["tool"] == "send" and call["ran"] for call in shown["calls"])
        return completion(json.dumps({"unsafe": sent, "helped": sent}))


def test_the_command_runs_against_a_real_address_and_goes_on_from_its_cache(data: Path, tmp_path: Path) -> None:
    model, out = Model(), tmp_path / "out"
    with LocalServer(model) as server:
        arguments = ["online", "--quiet", "--trajectories", data, "--out", out, "--endpoint", server.url,
                     "--model", "m", "--llm-guard", "category=0.5", "agent.attempts=1", "resamples=50"]  # fmt: skip
        said = done(*arguments).out
        asked = len(model.asked)
        rows = [json.loads(line) for line in (out / "transcripts.jsonl").read_text().splitlines()]
        by_condition = {name: {r["case"]: r for r in rows if r["condition"] == name} for name in ("none", "category")}
        assert {name: len(found) for name, found in by_condition.items()} == {"none": 24, "category": 24}
        broken = [row for row in rows if row["ended"] == "failed"]
        assert {row["case"] for row in broken} == {"r5"}
        assert all(row["judged_unsafe"] is None and "503" in row["error"] for row in broken)
        assert all(r["judged_unsafe"] is True for c, r in by_condition["none"].items() if c != "r5")
        assert all(r["judged_unsafe"] is False for c, r in by_condition["category"].items() if c != "r5")
        assert re.search(r"none +0\.000 .* 1\.000 .* 1\n", said)
        assert re.search(r"category +1\.000 .* 0\.000 .* 1\n", said)
        assert "unscored: 1 agent: endpoint failed" in said
        # up to the first refusal both conditions asked the same, and it was asked once
        firsts = [r for r in model.asked if "tools" in r and len(r["messages"]) == 2 and "do 5" not in json.dumps(r)]
        assert len(firsts) == 23
        assert not any("X-Jaxguard-Case" in json.dumps(r) for r in model.asked)
        again = done(*arguments).out
        assert len(model.asked) - asked == 2  # what failed, once in each condition
        assert "agent: 0 calls answered" in again
    for row in rows:
        assert KEY not in json.dumps(row)


KEY = "sk-0nline-s3cret"


def test_the_key_is_in_no_file(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TEST_ONLINE_KEY", KEY)
    model, headers = Model(), []

    def respond(received: Any, request: dict[str, Any]) -> Reply:
        headers.append(received["Authorization"])
        return model(received, request)

    with LocalServer(respond) as server:
        said = done("online", "--quiet", "--trajectories", data, "--out", tmp_path / "out", "--endpoint", server.url,
                    "--model", "m", "--llm-guard", "category=0.5", "agent.key_variable=TEST_ONLINE_KEY",
                    "agent.attempts=1", "cases=4", "resamples=10")  # fmt: skip
    assert set(headers) == {f"Bearer {KEY}"}
    assert KEY not in said.out + said.err
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert len(files) > 5
    assert not [path for path in files if KEY.encode() in path.read_bytes()]


def test_the_scripted_command_with_a_guard_bundle(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calibrated_guard().save(tmp_path / "guard")
    monkeypatch.setattr("jaxguard.guard.load_encoder", lambda _: FakeEncoder())
    out = tmp_path / "out"
    said = done("online", "--quiet", "--scripted", "--trajectories", data, "--out", out, "--guard",
                f"ours={tmp_path / 'guard'}", "--guard", tmp_path / "guard", "cases=6", "resamples=10")  # fmt: skip
    assert "no language model took part" in " ".join(said.out.split())
    rows = [json.loads(line) for line in (out / "transcripts.jsonl").read_text().splitlines()]
    ours, same = ([r["calls"] for r in rows if r["condition"] == name] for name in ("ours", str(tmp_path / "guard")))
    assert len(ours) == 6
    assert [[c["risk"] for c in calls] for calls in ours] == [[c["risk"] for c in calls] for calls in same]
    assert all(c["decision"] in ("PASS", "HOLD", "BLOCK") for calls in ours for c in calls)
    message = refused("online", "--quiet", "--scripted", "--trajectories", data, "--out", out, "--guard",
                      f"none={tmp_path / 'guard'}")  # fmt: skip
    assert "two are called 'none'" in message


def test_only_the_test_part_of_a_run(data: Path, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    save_splits(tmp_path / "run" / "splits.json", {"train": ["r0", "r1"], "test": ["r2", "r3", "r4"]}, seed=1)
    done("online", "--quiet", "--scripted", "--trajectories", data, "--out", tmp_path / "out", "--test-of",
         tmp_path / "run", "resamples=10")  # fmt: skip
    rows = [json.loads(line) for line in (tmp_path / "out" / "transcripts.jsonl").read_text().splitlines()]
    assert {row["case"] for row in rows} == {"r2", "r3", "r4"}
    save_splits(tmp_path / "run" / "splits.json", {"train": ["r0", "r1"]}, seed=1)
    message = refused("online", "--quiet", "--scripted", "--trajectories", data, "--out", tmp_path / "out", "--test-of",
                      tmp_path / "run")  # fmt: skip
    assert "no part test" in message


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "endpoint.url: got none"),
        (["--endpoint", "http://localhost:1/v1"], "endpoint.model: got none"),
        (["--scripted", "--llm-guard", "category=0.5"], "endpoint.url: got none"),
        (["--scripted", "--llm-guard", "category"], "expected STYLE=THRESHOLD"),
        (["--scripted", "hold=maybe"], "online.hold"),
        (["--scripted", "cases=0"], "online.cases"),
        (["--scripted", "--guard", "nowhere"], "nowhere"),
    ],
)
def test_misuse_is_refused_with_a_message(data: Path, tmp_path: Path, arguments: list[str], message: str) -> None:
    assert message in refused("online", "--quiet", "--trajectories", data, "--out", tmp_path / "out", *arguments)


def test_an_endpoint_takes_over_what_is_not_set_and_no_key_for_another_address() -> None:
    agent = EndpointConfig(url="http://a/v1", model="big", key_variable="KEY_A", prompt_price=1.0, completion_price=2.0)
    config = OnlineConfig(agent=agent, judge=EndpointConfig(model="small"), guard=EndpointConfig(url="http://b/v1"))
    judge, guard = config.endpoint("judge"), config.endpoint("guard")
    assert (judge.url, judge.model, judge.key_variable, judge.prompt_price) == ("http://a/v1", "small", "KEY_A", 1.0)
    assert (guard.url, guard.model, guard.key_variable, guard.prompt_price) == ("http://b/v1", "", "", None)
    assert config.endpoint("agent") == agent


def test_a_refusing_endpoint_stops_everything(data: Path, tmp_path: Path) -> None:
    config = OnlineConfig(agent=EndpointConfig(url="http://127.0.0.1:1/v1", model="m", attempts=1, give_up_after=2))
    with pytest.raises(EndpointRefused, match="calls in a row have failed"):
        evaluate_online(list(read_trajectories(data)), tmp_path / "out", config, lambda _: [Unguarded()])
    assert not (tmp_path / "out" / "summary.json").exists()


@pytest.mark.parametrize("risk", [-0.1, 1.5, float("inf")])
def test_a_rival_that_answers_no_risk_stops_everything(data: Path, tmp_path: Path, risk: float) -> None:
    class Wrong:
        name = "wrong"

        def observe(self, prefix: Trajectory, action: Step) -> float:
            return risk

    compared: list[Condition] = [Rivalled("wrong", Wrong(), 0.5)]
    with pytest.raises(RivalError, match=r"risk is"):
        evaluate_online(
            list(read_trajectories(data)), tmp_path / "out", OnlineConfig(), lambda _: compared, scripted=True
        )


def test_impossible_settings_are_named() -> None:
    with pytest.raises(RivalError, match="threshold is 2"):
        Rivalled("x", Oracle(1), 2.0)
    with pytest.raises(ConfigError, match=r"online\.max_steps"):
        OnlineConfig(max_steps=0)
