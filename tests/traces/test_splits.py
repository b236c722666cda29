"""Splits: nothing that belongs together is torn apart, and labels are spread as far as groups allow."""

from __future__ import annotations

import json
import random

import pytest

from jaxguard.traces.convert import convert
from jaxguard.traces.jsonl import read_trajectories
from jaxguard.traces.splits import (
    SplitError,
    action_fingerprint,
    load_splits,
    make_splits,
    save_splits,
    transfer_splits,
)
from jaxguard.types import Step, Trajectory

FRACTIONS = {"train": 0.6, "val": 0.1, "calibration": 0.1, "test": 0.2}


def trajectory(name, group="", unsafe=False, actions=None, instruction=None, **more):
    actions = [("say", {"text": name})] if actions is None else actions
    steps = tuple(Step(tool, arguments, str(i)) for i, (tool, arguments) in enumerate(actions))
    return Trajectory(
        name, f"task of {name}" if instruction is None else instruction, steps, unsafe, group=group, **more
    )


def part_of(splits):
    return {name: part for part, names in splits.items() for name in names}


def many(groups, per_group, unsafe_every=3):
    return [
        trajectory(f"{g}-{i}", group=f"g{g}", unsafe=(g * per_group + i) % unsafe_every == 0)
        for g in range(groups)
        for i in range(per_group)
    ]


def test_groups_stay_together_and_all_is_assigned():
    made = many(40, 5)
    splits = make_splits(made, FRACTIONS, seed=1)
    assert list(splits) == list(FRACTIONS)
    where = part_of(splits)
    assert where.keys() == {t.id for t in made}
    assert sum(map(len, splits.values())) == len(made)
    for group in {t.group for t in made}:
        assert len({where[t.id] for t in made if t.group == group}) == 1


def test_fractions_and_labels_are_met():
    made = many(100, 2)
    splits = make_splits(made, FRACTIONS, seed=3)
    labels = {t.id: t.unsafe for t in made}
    for part, share in FRACTIONS.items():
        assert len(splits[part]) == pytest.approx(share * 200, abs=2)
        assert sum(labels[i] for i in splits[part]) == pytest.approx(share * sum(labels.values()), abs=2)


def test_a_small_set_gets_both_labels_everywhere():
    for seed in range(20):
        made = [trajectory(f"t{i}", unsafe=i < 4) for i in range(12)]
        labels = {t.id: t.unsafe for t in made}
        for names in make_splits(made, FRACTIONS, seed=seed).values():
            assert {labels[i] for i in names} == {True, False}


def test_seed_decides_and_order_does_not():
    made = many(30, 3)
    first = make_splits(made, FRACTIONS, seed=5)
    shuffled = made.copy()
    random.Random(0).shuffle(shuffled)
    assert make_splits(shuffled, FRACTIONS, seed=5) == first
    assert make_splits(made, FRACTIONS, seed=6) != first


def test_duplicate_texts_join_across_groups_transitively():
    same = {"actions": [("send", {"to": "x", "cc": ["y"]})], "instruction": "mail it"}
    made = [
        trajectory("a1", group="A"),
        trajectory("a2", group="A", **same),
        trajectory("b1", group="B", **same),
        trajectory("b2", group="B"),
        *[trajectory(f"z{i}") for i in range(20)],
    ]
    for seed in range(10):
        where = part_of(make_splits(made, {"train": 0.5, "test": 0.5}, seed=seed))
        assert len({where[i] for i in ("a1", "a2", "b1", "b2")}) == 1


def test_equal_actions_join_only_on_request():
    made = [trajectory(f"t{i}", actions=[("run", {"b": 2, "a": "x  y\n"})]) for i in range(10)]
    made += [trajectory(f"empty{i}", actions=[]) for i in range(10)]
    halves = {"train": 0.5, "test": 0.5}
    assert all(len(names) == 10 for names in make_splits(made, halves, seed=0).values())
    where = part_of(make_splits(made, halves, seed=0, join_actions=True))
    assert len({where[f"t{i}"] for i in range(10)}) == 1
    # The empty sequence says nothing, so it joins nothing.
    empty = [trajectory(f"empty{i}", actions=[]) for i in range(10)]
    assert all(len(names) == 5 for names in make_splits(empty, halves, seed=0, join_actions=True).values())


def test_fingerprints_compare_values():
    def one(arguments, raw=None):
        return action_fingerprint(Trajectory("x", "", (Step("t", arguments, "c", raw_arguments=raw),)))

    assert one({"a": 1, "b": "x y"}) == one({"b": "x \n y", "a": 1})
    assert one({"a": 1}) != one({"a": "1"})
    assert one(None, "{") != one(None, "}")
    assert one({}) != action_fingerprint(Trajectory("x", "", ()))


def test_grouping_by_a_metadata_field():
    made = [
        trajectory(f"{task}-{goal}", group=f"task{task}", unsafe=goal % 2 == 0, metadata={"goal": f"goal{goal}"})
        for task in range(6)
        for goal in range(10)
    ]
    # Runs that stopped before they saw a goal are equal under all of them, and tell nothing of any.
    made += [
        trajectory(f"stopped-{goal}", actions=[], instruction="same", metadata={"goal": f"goal{goal}"})
        for goal in range(10)
    ]
    splits = make_splits(made, FRACTIONS, seed=2, group_by="goal")
    where = part_of(splits)
    for goal in range(10):
        assert len({where[f"{task}-{goal}"] for task in range(6)}) == 1
    assert len({where[f"stopped-{goal}"] for goal in range(10)}) == 1
    assert all(splits.values())


@pytest.mark.parametrize(
    ("fractions", "message"),
    [
        ({"train": 0.5, "test": 0.4}, "add up to 0.9, expected 1"),
        ({"train": 1.5, "test": -0.5}, "fractions.test: got -0.5, expected a number that is not negative"),
        ({"train": float("nan")}, "fractions.train: got nan"),
        ({}, "add up to 0, expected 1"),
    ],
)
def test_bad_fractions(fractions, message):
    with pytest.raises(SplitError, match=message):
        make_splits(many(3, 1), fractions, seed=0)


def test_bad_trajectories():
    with pytest.raises(SplitError, match="got none, expected at least one"):
        make_splits([], FRACTIONS, seed=0)
    with pytest.raises(SplitError, match="the id 'a' occurs more than once"):
        make_splits([trajectory("a"), trajectory("a")], FRACTIONS, seed=0)


def test_a_part_without_a_share_is_empty():
    splits = make_splits(many(4, 1), {"train": 1.0, "test": 0.0}, seed=0)
    assert (len(splits["train"]), splits["test"]) == (4, [])


def test_save_and_load(tmp_path):
    made = many(20, 2)
    splits = make_splits(made, FRACTIONS, seed=9)
    path = tmp_path / "new" / "splits.json"
    save_splits(path, splits, seed=9, group_by="goal", join_actions=True)
    assert load_splits(path) == splits
    assert load_splits(path, (t.id for t in made)) == splits
    content = json.loads(path.read_text())
    assert (content["seed"], content["group_by"], content["join_actions"]) == (9, "goal", True)
    with pytest.raises(SplitError, match=r"1 ids \('new'\) are among the trajectories, but not in the split"):
        load_splits(path, [*(t.id for t in made), "new"])
    with pytest.raises(SplitError, match=r"4 ids \('0-0', '0-1', '1-0', ...\) are in the split, but not among"):
        load_splits(path, [t.id for t in made[4:]])


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "expected a file written by save_splits"),
        ("[]", "jaxguard_splits is None, expected 1"),
        ('{"jaxguard_splits": 2, "splits": {}}', "jaxguard_splits is 2, expected 1"),
        ('{"jaxguard_splits": 1, "splits": {"train": [1]}}', "splits is no object of id lists"),
        ('{"jaxguard_splits": 1, "splits": {"a": ["x"], "b": ["x"]}}', "the id 'x' stands in a and in b"),
    ],
)
def test_broken_split_files(tmp_path, content, message):
    path = tmp_path / "splits.json"
    path.write_text(content)
    with pytest.raises(SplitError, match=message):
        load_splits(path)


def test_no_split_file(tmp_path):
    with pytest.raises(SplitError, match="No such file"):
        load_splits(tmp_path / "splits.json")


def test_a_field_to_group_by_that_nothing_has_is_refused():
    made = [trajectory(f"t{i}", metadata={"domain": f"d{i % 3}", "pair": None}) for i in range(20)]
    for name in ("domian", "pair"):
        with pytest.raises(SplitError, match=f"group_by: no trajectory has '{name}' in its metadata, .*\\(domain\\)"):
            make_splits(made, FRACTIONS, seed=0, group_by=name)
    assert make_splits(made, FRACTIONS, seed=0, group_by="domain")
    bare = [trajectory("t0")]
    with pytest.raises(SplitError, match=r"expected one of the fields there \(none\)"):
        make_splits(bare, FRACTIONS, seed=0, group_by="domain")


def test_a_split_file_that_is_nested_too_deeply_is_named(tmp_path):
    (tmp_path / "splits.json").write_text("[" * 100_000)
    with pytest.raises(SplitError, match=r"splits.json: nested too deeply, expected a file written by save_splits"):
        load_splits(tmp_path / "splits.json")


@pytest.mark.data
@pytest.mark.slow
def test_agentdyn_by_task_and_by_goal(data_dir, tmp_path):
    convert(data_dir / "agentdyn", tmp_path)
    made = list(read_trajectories(tmp_path))
    unsafe = {t.id: t.unsafe for t in made}
    for group_by, keys in (
        (None, {t.id: t.group for t in made}),
        ("injection_task_id", {t.id: t.metadata["injection_task_id"] for t in made if t.unsafe}),
    ):
        splits = make_splits(made, FRACTIONS, seed=0, group_by=group_by)
        where = part_of(splits)
        for key in set(keys.values()):
            assert len({where[i] for i, k in keys.items() if k == key}) == 1
        for part, share in FRACTIONS.items():
            assert len(splits[part]) == pytest.approx(share * 3297, rel=0.05)
            assert sum(unsafe[i] for i in splits[part]) == pytest.approx(share * 641, rel=0.2)


def test_twins_with_different_titles_stay_together() -> None:
    def twin(i: int, side: str) -> Trajectory:
        step = Step(f"tool_{i}_{side}", {}, "c0")
        metadata = {"pair": f"P{i}"}
        return Trajectory(f"{i}-{side}", f"{side} {i}", (step,), group=f"{side}{i}", source="s", metadata=metadata)

    twins = [twin(i, side) for i in range(30) for side in ("rogue", "clean")]
    splits = make_splits(twins, {"train": 0.5, "test": 0.5}, seed=3)
    train = {name.split("-")[0] for name in splits["train"]}
    assert train
    assert not train & {name.split("-")[0] for name in splits["test"]}


def foreign(groups, per_group):
    return [
        trajectory(f"u{g}-{i}", group=f"u{g}", unsafe=i % 2 == 0, source="elsewhere")
        for g in range(groups)
        for i in range(per_group)
    ]


def test_an_unseen_set_is_calibrated_and_tested_on_in_whole_groups() -> None:
    seen, unseen = many(40, 5), foreign(20, 4)
    splits = transfer_splits(seen, unseen, FRACTIONS | {"validation": 0.2}, seed=1, local=10)
    part = part_of(splits)
    assert part.keys() == {t.id for t in [*seen, *unseen]}
    assert {part[t.id] for t in seen} == {"train", "validation"}
    assert len(splits["train"]) == pytest.approx(200 * 0.6 / 0.8, abs=10)
    assert len(splits["calibration"]) == 10
    label = {t.id: t.unsafe for t in unseen}
    assert not any(label[name] for name in splits["calibration"])
    assert {name.split("-")[0] for name in splits["calibration"]}.isdisjoint(n.split("-")[0] for n in splits["test"])
    assert all(label[name] for name in splits["left_out"])
    assert len(splits["test"]) == 80 - 10 - 10
    assert splits == transfer_splits(reversed(seen), reversed(unseen), FRACTIONS | {"validation": 0.2}, 1, 10)


def test_what_also_stands_in_the_unseen_set_is_not_trained_on() -> None:
    unseen = foreign(10, 4)
    copied = trajectory("copy", actions=[("say", {"text": unseen[0].id})], instruction=unseen[0].instruction)
    splits = transfer_splits([*many(10, 5), copied], unseen, FRACTIONS | {"validation": 0.2}, seed=1, local=4)
    assert "copy" in splits["left_out"]


@pytest.mark.parametrize("local", [20, 19, 50])
def test_too_few_local_trajectories(local) -> None:
    with pytest.raises(SplitError, match=rf"unseen: \d+ safe trajectories .* expected {local} and some more"):
        transfer_splits(many(10, 5), foreign(10, 4), FRACTIONS | {"validation": 0.2}, seed=1, local=local)


def test_training_parts_need_a_share() -> None:
    with pytest.raises(SplitError, match="train \\+ validation is 0"):
        transfer_splits(many(10, 5), foreign(10, 4), {"train": 0, "validation": 0}, seed=1, local=5)
