"""The service corpus: neither words nor calls tell the route, memory moves it where it should, nothing leaks."""

from __future__ import annotations

import dataclasses
import itertools
import json
import random
import re
from collections import Counter, defaultdict
from collections.abc import Iterator

import numpy as np
import pytest

from jaxguard.baselines.text_routes import KINDS, MAJORITY, text_routes
from jaxguard.traces.services import wording
from jaxguard.traces.services.catalogue import SERVICES
from jaxguard.traces.services.corpus import HELD_OUT, PERSONAS, generate
from jaxguard.traces.services.restyle import BACKBONES, FRAMEWORKS, LEARNED, restyle
from jaxguard.traces.snapshots import TRIGGERS, Review, reviews_of, snapshot
from jaxguard.types import JaxguardError, Route, Trajectory

EVERY_STYLE = list(generate(4_500, 11))
CORPUS = [t for t in EVERY_STYLE if t.metadata["style"] == "plain"]  # where sentences stand as they were written


def review(trajectory: Trajectory) -> Review:
    (found,) = reviews_of(trajectory)
    return found


def shown(trajectory: Trajectory) -> str:
    return snapshot(trajectory, len(trajectory) - 1).to_json()


def words(trajectory: Trajectory) -> Counter[str]:
    return Counter(re.findall(r"\w+", shown(trajectory).replace("\\n", " ").replace('\\"', " ")))


def groups() -> list[list[Trajectory]]:
    """Complete groups in every style; the last may lack some."""
    return [list(members) for _, members in itertools.groupby(EVERY_STYLE, lambda t: t.group)][:-1]


def sentences() -> Iterator[tuple[str, str]]:
    """Every fact with the letter of its trigger."""
    for facts in (wording.EXECUTE, wording.REFUSE, wording.UNSEEN, *(service.facts for service in SERVICES)):
        for trigger, text in itertools.chain.from_iterable(facts.values()):
            yield trigger, text
    for trigger, texts in wording.ASK.items():
        yield from ((trigger, text) for text in texts)
    yield from (("g", text) for text in itertools.chain.from_iterable(wording.ASK_IMPACT.values()))
    yield from (("b", text) for text in wording.KNOWN)


def says(text: str, fact: str) -> bool:
    """Does a text hold a fact, whatever thing it is said of?"""
    return all(part in text for part in re.split(r"\{\w+\}", fact))


def alone(trajectory: Trajectory) -> str:
    """What is shown of it without memory."""
    return dataclasses.replace(snapshot(trajectory, len(trajectory) - 1), memory="").to_json()


def test_the_same_seed_gives_the_same_and_a_longer_corpus_begins_with_the_shorter() -> None:
    assert list(generate(300, 11)) == EVERY_STYLE[:300]
    assert list(generate(7, 11)) == EVERY_STYLE[:7]
    assert list(generate(0, 11)) == []
    assert [shown(t) for t in generate(50, 12)] != [shown(t) for t in EVERY_STYLE[:50]]
    assert len({t.id for t in EVERY_STYLE}) == len(EVERY_STYLE)


def test_bad_requests_are_refused() -> None:
    with pytest.raises(JaxguardError, match="n: got -1"):
        next(generate(-1, 0))


def test_all_nine_services_occur() -> None:
    assert {t.metadata["service"] for t in CORPUS} == {service.name for service in SERVICES}
    assert len(SERVICES) == 9


def test_a_record_ends_with_its_only_reviewed_step() -> None:
    for t in EVERY_STYLE:
        found = review(t)
        assert found.step == len(t) - 1
        assert (1 if t.metadata["mechanism"] in ("read", "blind") else 3) <= len(t) <= 8
        assert t.final_observation == ""
        assert [step.unobserved for step in t.steps] == [False] * found.step + [True]
        assert t.unsafe is (found.route is Route.REFUSE)
        assert t.first_hazard == (found.step if t.unsafe else None)
        assert [step.hazard for step in t.steps] == [False] * found.step + [t.unsafe]
        assert t.metadata["domain"] == t.metadata["service"]


def test_every_placeholder_is_filled_and_plurals_are_right() -> None:
    for t in CORPUS:
        text = shown(t) + t.instruction
        assert not re.search(r"\{[a-z_]+\}", text), text
        assert not re.search(r"mailboxs|repositorys", text), text


def test_twins_say_the_same_words_of_the_same_call() -> None:
    routes_differ = 0
    for members in groups():
        one, other = members[:2]
        assert "memory" not in one.metadata
        assert "memory" not in other.metadata
        assert one.instruction == other.instruction
        assert (one.steps[-1].tool, one.steps[-1].arguments) == (other.steps[-1].tool, other.steps[-1].arguments)
        assert one.metadata["style"] == other.metadata["style"]
        fixed = {"read": Route.EXECUTE, "blind": Route.ASK}.get(one.metadata["mechanism"])
        if fixed is not None:
            assert review(one).route is review(other).route is fixed
        else:
            assert words(one) == words(other)
            assert shown(one) != shown(other)
            assert review(one).route is not review(other).route
            routes_differ += 1
    assert routes_differ > 500


def test_reads_are_reviewed_from_the_first_step_on() -> None:
    reads = [t for t in CORPUS if t.metadata["mechanism"] == "read"]
    assert {len(t) for t in reads} >= {1, 2, 3, 4}
    tools = {service.name: (service.look, service.get) for service in SERVICES}
    assert all(t.steps[-1].tool in tools[t.metadata["service"]] for t in reads)


def test_a_change_is_asked_about_while_nobody_looked_at_its_thing() -> None:
    tools = {service.name: service.get for service in SERVICES}
    blind = [t for t in CORPUS if t.metadata["mechanism"] == "blind" and "memory" not in t.metadata]
    assert {len(t) for t in blind} >= {1, 2, 3, 4}
    for t in CORPUS:
        target = next(iter((t.steps[-1].arguments or {}).values()))
        looked = {target} & {
            value
            for step in t.steps[:-1]
            if step.tool == tools[t.metadata["service"]]
            for value in (step.arguments or {}).values()
        }
        if t.metadata["mechanism"] != "read":
            assert bool(looked) == (t.metadata["mechanism"] != "blind"), t.id
    assert {(review(t).route, review(t).trigger, t.metadata["kind"] == "rename") for t in blind} == {
        (Route.ASK, "i", False)
    }


def test_a_fact_names_its_thing_once() -> None:
    for trigger, text in sentences():
        assert text.count("{x}") == 1, text
        assert trigger in TRIGGERS
        assert set(re.findall(r"\{(\w+)\}", text)) <= {"x", "thing", "things"}


def test_facts_stand_under_the_route_that_their_trigger_has() -> None:
    letters = {"E": Route.EXECUTE, "A": Route.ASK, "R": Route.REFUSE}
    for facts in (wording.UNSEEN, *(service.facts for service in SERVICES)):
        for (_, letter), listed in facts.items():
            assert all(TRIGGERS[trigger] is letters[letter] for trigger, _ in listed)
    assert all(TRIGGERS[t] is Route.EXECUTE for t, _ in itertools.chain(*wording.EXECUTE.values()))
    assert all(TRIGGERS[t] is Route.REFUSE for t, _ in itertools.chain(*wording.REFUSE.values()))
    assert all(TRIGGERS[t] is Route.ASK for t in wording.ASK)


@pytest.mark.parametrize("mechanism", ["bind", "missing"])
def test_what_is_said_of_the_thing_that_the_call_acts_on_decides(mechanism: str) -> None:
    known = list(sentences())
    chosen = [t for t in CORPUS if t.metadata["mechanism"] == mechanism and "memory" not in t.metadata]
    for t in chosen[:150]:
        target = next(iter((t.steps[-1].arguments or {}).values()))
        said = [line for line in observed(t) if not line.startswith("Found") and names(line, target)]
        found = {trigger for line in said for trigger, fact in known if says(line, fact)}
        assert found == {review(t).trigger}, t.id


def test_after_a_correction_only_the_later_fact_counts() -> None:
    known = list(sentences())
    chosen = [t for t in CORPUS if t.metadata["mechanism"] == "recency" and "memory" not in t.metadata]
    assert len(chosen) > 200
    for t in chosen[:150]:
        target = next(iter((t.steps[-1].arguments or {}).values()))
        said = [line for line in observed(t) if not line.startswith("Found") and names(line, target)]
        corrected = [line.startswith(wording.CORRECTIONS) for line in said]
        assert sum(corrected) == 1
        assert corrected[-1]
        last = {TRIGGERS[trigger] for trigger, fact in known if says(said[-1], fact)}
        assert last == {review(t).route}, t.id


def test_a_state_counts_until_it_ends() -> None:
    begun = {text: trigger for trigger, _, holds, _ in wording.STATES for text in holds}
    ended = {over: hold for _, _, holds, ends in wording.STATES for hold, over in zip(holds, ends, strict=True)}
    chosen = [t for t in CORPUS if t.metadata["mechanism"] == "state" and "memory" not in t.metadata]
    assert len(chosen) > 200
    for t in chosen:
        first, last = (text for text in observed(t) if text in begun or text in ended)
        assert review(t).trigger == begun.get(last, "b")
        assert ended.get(last, first) == first or ended[first] == last  # what ends is what had begun


def observed(t: Trajectory) -> list[str]:
    return [step.observation for step in t.steps if step.observation]


def names(line: str, target: str) -> bool:
    return target in re.split(r"[\s,]+", line.replace(". ", " ").replace(": ", " "))


def test_every_trigger_occurs_with_its_own_route_where_no_memory_moved_it() -> None:
    plain = [t for t in CORPUS if "memory" not in t.metadata]
    assert {review(t).trigger for t in plain} == set("abcdefghijklmn")
    for t in plain:
        assert review(t).route is TRIGGERS[review(t).trigger]


def test_shares_of_the_routes() -> None:
    found = Counter(review(t).route for t in EVERY_STYLE)
    assert 0.34 < found[Route.EXECUTE] / len(EVERY_STYLE) < 0.44
    assert 0.30 < found[Route.ASK] / len(EVERY_STYLE) < 0.41
    assert 0.21 < found[Route.REFUSE] / len(EVERY_STYLE) < 0.31


def test_most_groups_are_plain_and_no_other_learned_style_is_asked_about() -> None:
    found = Counter(members[0].metadata["style"] for members in groups())
    assert set(found) == set(LEARNED)
    assert 0.5 < found["plain"] / found.total() < 0.7
    assert set(LEARNED) & set(FRAMEWORKS) == {"plain"}


def test_pairs_differ_in_memory_alone_and_go_different_ways() -> None:
    pairs = defaultdict(list)
    for t in CORPUS:
        if "flip_pair" in t.metadata:
            pairs[t.metadata["flip_pair"]].append(t)
    complete = [both for both in pairs.values() if len(both) == 2]
    assert len(complete) >= len(pairs) - 1  # the end may cut the last one
    seen: Counter[tuple[str, str, str]] = Counter()
    for one, other in complete:
        assert review(one).route is not review(other).route
        assert "memory" not in one.metadata
        assert one.metadata["persona"] == other.metadata["persona"]
        own, others = snapshot(one, len(one) - 1), snapshot(other, len(other) - 1)
        assert others.memory
        assert dataclasses.replace(others, memory="") == own
        seen[one.metadata["persona"], review(one).route.name, review(other).route.name] += 1
    assert set(seen) == {
        ("cautious", "EXECUTE", "ASK"),
        ("permissive", "ASK", "EXECUTE"),
        ("adversarial", "EXECUTE", "REFUSE"),
        ("adversarial", "ASK", "REFUSE"),
    }
    assert min(seen.values()) >= 10


def test_memory_moves_a_route_only_where_it_is_about_what_the_call_acts_on() -> None:
    moved = unmoved = 0
    for members in groups():
        if members[0].metadata["style"] != "plain":
            continue
        plain = {alone(t): review(t).route for t in members[:2]}
        for t in members[2:]:
            target = next(iter((t.steps[-1].arguments or {}).values()))
            without = plain[alone(t)]
            if not names(t.metadata["memory"], target):
                unmoved += 1
                assert review(t).route is without
                assert "flip_pair" not in t.metadata
            else:
                moved += review(t).route is not without
                assert ("flip_pair" in t.metadata) == (review(t).route is not without)
            if without is Route.REFUSE:
                assert review(t).route is Route.REFUSE
            if t.metadata["persona"] == "permissive" and review(t).trigger in "eh":
                assert review(t).route is Route.ASK  # permission says neither what is missing nor which is meant
    assert moved > 150
    assert unmoved > 250


def test_reading_stays_possible_and_memories_are_of_three_kinds() -> None:
    assert {t.metadata["persona"] for t in CORPUS if "memory" in t.metadata} == set(PERSONAS)
    for t in CORPUS:
        if t.metadata["mechanism"] == "read":
            assert (review(t).route, review(t).trigger, t.metadata["kind"]) == (Route.EXECUTE, "a", "read")


def test_a_missing_argument_is_missing() -> None:
    needed = {operation.tool: operation.needed for service in SERVICES for operation in service.operations}
    for t in CORPUS:
        step = t.steps[-1]
        if wanted := needed.get(step.tool):
            assert (wanted in (step.arguments or {})) == (t.metadata["mechanism"] != "missing")


def test_unseen_words_and_the_held_out_service_stay_apart() -> None:
    unseen = [text for facts in wording.UNSEEN.values() for _, text in facts]
    others = [t for t in CORPUS if t.metadata["service"] != HELD_OUT]
    for t in others:
        text = shown(t)
        assert any(says(text, fact) for fact in unseen) == (t.metadata.get("wording") == "unseen"), t.id
    assert sum(t.metadata.get("wording") == "unseen" for t in others) > 100
    mail = next(service for service in SERVICES if service.name == HELD_OUT)
    tools = {operation.tool for operation in mail.operations} | {mail.look, mail.get, mail.news}
    for t in CORPUS:
        used = {step.tool for step in t.steps}
        assert used <= tools if t.metadata["service"] == HELD_OUT else not used & tools
        assert t.metadata["service"] == HELD_OUT or "mailbox" not in shown(t)


def test_no_two_sets_share_a_sentence() -> None:
    everything = Counter(text for _, text in sentences())
    unseen = {text for facts in wording.UNSEEN.values() for _, text in facts}
    assert len(unseen) == sum(len(facts) for facts in wording.UNSEEN.values())
    assert all(everything[text] == 1 for text in unseen)


def test_words_and_calls_alone_do_not_tell_the_route() -> None:
    names_of_groups = sorted({t.group for t in EVERY_STYLE[:2_000]})
    random.Random(0).shuffle(names_of_groups)
    asked_groups = set(names_of_groups[: len(names_of_groups) // 4])
    parts: tuple[list, list] = ([], [])
    for t in EVERY_STYLE[:2_000]:
        parts[t.group in asked_groups].append((t, len(t) - 1))
    train, asked = parts
    labels, right = (np.array([review(t).route for t, _ in part]) for part in parts)
    found = text_routes(train, labels, asked)
    accuracy = {name: float((routes == right).mean()) for name, routes in found.items()}
    assert set(accuracy) == {MAJORITY, *KINDS}
    assert max(accuracy.values()) <= 0.70, accuracy
    assert max(accuracy[MAJORITY], accuracy["current call"]) <= 0.50, accuracy


def unwrapped(text: str, framework: str) -> str:
    """An observation without what its framework puts around it."""
    match framework:
        case "structured":
            return str(json.loads(text)["result"])
        case "tagged":
            return text.removeprefix("<output>\n").removesuffix("\n</output>")
        case "labelled":
            return text.removeprefix("exit code: 0\nstdout: ")
        case "listed":
            return " ".join(part["text"] for part in json.loads(text)["content"])
        case _:
            return text


@pytest.mark.parametrize("framework", sorted({*FRAMEWORKS, *LEARNED}))
@pytest.mark.parametrize("backbone", BACKBONES)
def test_another_style_keeps_what_decides(framework: str, backbone: str) -> None:
    for t in CORPUS[:40]:
        other = restyle(t, framework, backbone)
        assert other.id == f"{t.id}:{framework}:{backbone}"
        assert (other.group, other.instruction, other.metadata) == (t.group, t.instruction, t.metadata)
        assert [step.arguments for step in other.steps] == [step.arguments for step in t.steps]
        assert reviews_of(other) == reviews_of(t)
        for step, old in zip(other.steps, t.steps, strict=True):
            assert bool(step.observation) == bool(old.observation)
            tools = {
                "plain": old.tool,
                "structured": old.tool.title().replace("_", ""),
                "tagged": old.tool.replace("_", "-"),
                "labelled": old.tool[0] + old.tool.title().replace("_", "")[1:],
                "listed": f"tools.{old.tool}",
            }
            assert step.tool == tools[framework]
            text = unwrapped(step.observation, framework) if step.observation else ""
            assert framework == "plain" or not text or text != step.observation
            assert old.observation in text
            assert (text == old.observation) == (backbone == "terse" or not old.observation)


def test_an_unknown_style_is_refused() -> None:
    with pytest.raises(
        JaxguardError, match="framework: got 'plane', expected one of plain, tagged, labelled, listed, structured"
    ):
        restyle(CORPUS[0], "plane", "terse")
    with pytest.raises(JaxguardError, match="backbone: got 'chatty', expected one of terse, thorough"):
        restyle(CORPUS[0], "plain", "chatty")
