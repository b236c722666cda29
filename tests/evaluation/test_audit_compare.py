"""Agreement agrees with an independent library and with counting by hand; nothing is left out in silence."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
from audit_samples import NASTY, note, run, written
from sklearn.metrics import cohen_kappa_score

from jaxguard.evaluation.audit import CANNOT_SAY, NO_HAZARD, SAFE_RUN, UNSAFE_SOMEWHERE, AuditError, read_annotations
from jaxguard.evaluation.audit_compare import METRICS, Audit, agreement, compare_labels, kappa
from jaxguard.evaluation.audit_report import render_audit, write_audit
from jaxguard.types import Trajectory

# Per run: what A, B, the adjudicator and the set say; "-" is no annotation.
ANSWERS = {
    "a1": (1, 1, "-", 1),
    "a2": (1, 2, 2, 1),
    "b1": (0, 3, "unsure", 3),
    "b2": (None, None, "-", None),
    "c1": (2, None, None, 2),
    "c2": ("unsure", 1, 1, None),
    "d1": (1, "unsure", "-", 1),
    "d2": (3, "-", "-", 3),
    "e1": ("-", None, 0, None),
    "e2": ("-", "-", "-", None),
}


def sampled(seed: int, n: int = 300) -> tuple[np.ndarray, np.ndarray]:
    """Two annotators that agree on two of three; steps 0 to 5, and no hazard."""
    rng = np.random.default_rng(seed)
    a = rng.integers(NO_HAZARD, 6, n)
    return a, np.where(rng.random(n) < 0.66, a, rng.integers(NO_HAZARD, 6, n))


def one(n: int) -> np.ndarray:
    return np.ones((1, n))


@pytest.mark.parametrize("seed", range(4))
def test_kappa_is_that_of_scikit_learn(seed: int) -> None:
    a, b = sampled(seed)
    found = {name: float(value[0]) for name, value in agreement(one(len(a)), a, b).items()}
    assert found["kappa_unsafe"] == pytest.approx(cohen_kappa_score(a >= 0, b >= 0))
    assert found["kappa_step"] == pytest.approx(cohen_kappa_score(a, b))
    both = (a >= 0) & (b >= 0)
    linear = cohen_kappa_score(a[both], b[both], labels=range(6), weights="linear")
    assert found["kappa_step_linear"] == pytest.approx(linear)


def test_linear_weights_count_steps_not_categories() -> None:
    """With steps that nobody marked in between, as with all of them named to scikit-learn."""
    a, b = np.array([0, 9, 9, 2, 0, 9]), np.array([0, 2, 9, 2, 9, 9])
    found = float(kappa(one(6), a, b, rule="linear")[0])
    assert found == pytest.approx(cohen_kappa_score(a, b, labels=range(10), weights="linear"))
    assert found != pytest.approx(cohen_kappa_score(a, b, weights="linear"))


def test_kappa_within_one_by_hand() -> None:
    """No hazard (-1) is not beside step 0. Of 16 pairs of answers, 8 disagree by chance: by rows 1, 2, 2, 3 of 4."""
    a, b = np.array([NO_HAZARD, 0, 1, 3]), np.array([0, 0, 2, NO_HAZARD])
    # A has -1, 0, 1, 3 once each; B has -1 once, 0 twice, 2 once. Disagree: -1: 0 0 2; 0: -1 2; 1: -1; 3: -1 0 0.
    assert float(kappa(one(4), a, b, rule="within_one")[0]) == pytest.approx(1 - (2 / 4) / (9 / 16))


def test_weights_are_repetitions() -> None:
    a, b = sampled(9, 60)
    a[:7], b[5:12] = CANNOT_SAY, UNSAFE_SOMEWHERE
    counts = np.random.default_rng(1).integers(0, 4, 60)
    weighted = agreement(counts[None].astype(float), a, b)
    repeated = agreement(one(counts.sum()), np.repeat(a, counts), np.repeat(b, counts))
    for name in METRICS:
        np.testing.assert_allclose(weighted[name], repeated[name])


def test_what_is_undefined_is_nan() -> None:
    alike = agreement(one(3), np.full(3, NO_HAZARD), np.full(3, NO_HAZARD))
    assert float(alike["exact"][0]) == 1.0
    for name in ("kappa_unsafe", "kappa_step", "exact_marked", "kappa_step_linear"):
        assert math.isnan(alike[name][0])
    nothing = agreement(one(2), np.array([CANNOT_SAY, 1]), np.array([1, CANNOT_SAY]))
    assert all(math.isnan(value[0]) for value in nothing.values())


def test_labels_without_a_step_count_for_unsafe_or_safe_alone() -> None:
    a, b = np.array([2, NO_HAZARD, 1]), np.array([UNSAFE_SOMEWHERE, SAFE_RUN, 1])
    found = agreement(one(3), a, b)
    assert float(found["unsafe"][0]) == 1.0
    assert float(found["exact"][0]) == 1.0
    assert math.isnan(found["kappa_step"][0])  # one pair is left, of one category


def runs() -> dict[str, Trajectory]:
    return {name: run(name, first=said[3]) for name, said in ANSWERS.items()}


def audit(folder: Path, *, second: bool = True, final: bool = True, given: bool = True) -> Audit:
    found = runs()
    files = [
        written(
            folder / f"{letter}.jsonl",
            *(note(found[name], said[i], who) for name, said in ANSWERS.items() if said[i] != "-"),
        )
        for i, (letter, who) in enumerate((("A", "anna"), ("B", "ben"), ("C", "carla")))
    ]
    return compare_labels(
        files[0],
        files[1] if second else None,
        adjudicated=files[2] if final else None,
        trajectories=found if given else None,
        resamples=50,
    )


def test_counts_by_hand(tmp_path: Path) -> None:
    pair = audit(tmp_path).pairs[0]
    assert pair.counts == {
        "annotated by neither": 1,
        "annotated by the first only": 1,
        "annotated by the second only": 1,
        "annotated by both": 7,
        "only the first cannot say": 1,
        "only the second cannot say": 1,
        "both cannot say": 0,
        "both no hazard": 1,
        "same step": 1,
        "one step apart": 1,
        "further apart": 1,
        "unsafe and safe": 1,
        "safe and unsafe": 0,
        "both unsafe or both safe, the set names no step": 0,
    }
    values = {name: own.value for name, own in pair.metrics.items()}
    assert values["unsafe"] == 4 / 5
    assert values["exact"] == 2 / 5
    assert values["within_one"] == 3 / 5
    assert values["exact_marked"] == 1 / 3
    assert values["within_one_marked"] == 2 / 3
    assert (pair.of["exact"], pair.of["unsafe"], pair.of["exact_marked"]) == (5, 5, 3)
    assert all(own.low <= own.value <= own.high for own in pair.metrics.values() if math.isfinite(own.low))


def test_adjudication_by_hand(tmp_path: Path) -> None:
    found = audit(tmp_path).adjudication
    assert found is not None
    # d1 and d2 have one label each and none that is final; b1's adjudicator cannot say.
    assert found.counts == {"adjudicated": 4, "agreed": 2, "unsure": 1, "open": 2}
    assert found.final == {"a1": 1, "a2": 2, "b2": NO_HAZARD, "c1": NO_HAZARD, "c2": 1, "e1": 0}
    a, b, s = found.changes
    assert (a.source, a.shares["changed"].value, a.shares["flipped"].value) == ("A", 2 / 4, 1 / 4)
    assert (a.of, a.settled) == ({"changed": 4, "flipped": 4}, 1)
    assert (b.source, b.shares["changed"].value, b.shares["flipped"].value) == ("B", 1 / 6, 1 / 6)
    assert (s.source, s.shares["changed"].value, s.shares["flipped"].value) == ("S", 4 / 6, 3 / 6)


def test_disagreements_are_listed_gravest_first(tmp_path: Path) -> None:
    found = audit(tmp_path).disagreements
    assert [(own.trajectory, own.kind) for own in found] == [
        ("c1", "unsafe or safe"),
        ("b1", "steps apart"),
        ("a2", "steps apart"),
        ("c2", "cannot say"),
        ("d1", "cannot say"),
    ]
    assert found[0].answers == {"A": 2, "B": NO_HAZARD, "C": NO_HAZARD, "S": 2}


def test_groups_are_the_clusters_where_they_are_known(tmp_path: Path) -> None:
    grouped, alone = audit(tmp_path), audit(tmp_path, given=False)
    assert (grouped.grouped, grouped.clusters) == (True, 4)
    assert (alone.grouped, alone.clusters) == (False, 7)
    assert [(p.a, p.b) for p in grouped.pairs] == [("A", "B"), ("A", "S"), ("B", "S")]
    assert [(p.a, p.b) for p in alone.pairs] == [("A", "B")]
    assert grouped.pairs[0].metrics["exact"].value == alone.pairs[0].metrics["exact"].value


def test_a_set_is_the_second_annotator_where_there_is_no_other(tmp_path: Path) -> None:
    found = audit(tmp_path, second=False)
    (pair,) = found.pairs
    assert (pair.a, pair.b, pair.of["exact"]) == ("A", "S", 7)
    assert pair.metrics["exact"].value == 6 / 7
    assert found.adjudication is not None
    assert [own.source for own in found.adjudication.changes] == ["A", "S"]
    assert found.adjudication.counts["open"] == 0  # e2 has only the set's label: nobody looked at it


def test_what_cannot_be_compared_is_refused(tmp_path: Path) -> None:
    own, other = run("a"), run("b")
    a = written(tmp_path / "a.jsonl", note(own, 1))
    with pytest.raises(AuditError, match="expected a second annotation file, or trajectories"):
        compare_labels(a, None)
    with pytest.raises(AuditError, match="have no trajectory in common"):
        compare_labels(a, written(tmp_path / "b.jsonl", note(other, 1)))
    changed = written(tmp_path / "c.jsonl", note(run("a", instruction="else"), 1))
    message = r"c\.jsonl, line 1: digest: 'a' has another content than in .*a\.jsonl, line 1"
    with pytest.raises(AuditError, match=message):
        compare_labels(a, changed)
    with pytest.raises(AuditError, match=message):
        compare_labels(a, written(tmp_path / "d.jsonl", note(own, 2)), adjudicated=changed)
    with pytest.raises(AuditError, match="line 1: trajectory: 'a' is none of the 1 trajectories"):
        compare_labels(a, None, trajectories={"b": other})


# Reports


def test_text_shows_every_count_and_keeps_its_width(tmp_path: Path) -> None:
    found = audit(tmp_path)
    text = render_audit(found)
    for pair in found.pairs:
        for what in pair.counts:
            assert what in text
    assert "4 adjudicated, 2 agreed on and not adjudicated, 1 adjudicator cannot say, 2 still open" in " ".join(
        text.split()
    )
    assert "4 groups of the trajectories" in text
    assert max(map(len, text.splitlines())) <= 100
    assert "no groups are known" in render_audit(audit(tmp_path, given=False, final=False))


def test_page_values_and_list(tmp_path: Path) -> None:
    write_audit(tmp_path / "out", audit(tmp_path), runs())
    values = json.loads((tmp_path / "out" / "audit.json").read_text())
    exact = values["pairs"][0]["metrics"]["exact"]
    assert (exact["value"], exact["of"]) == (0.4, 5)
    assert values["adjudication"]["changes"][2]["shares"]["changed"]["value"] == pytest.approx(4 / 6)
    listed = [json.loads(line) for line in (tmp_path / "out" / "disagreements.jsonl").read_text().splitlines()]
    assert listed[0]["answers"] == {"A": "step 2", "B": "no hazard", "C": "no hazard", "S": "step 2"}
    assert len(listed) == values["disagreements"] == 5
    page = (tmp_path / "out" / "audit.html").read_text()
    for text in ("0.400", "Changed by adjudication", "annotated by the first only", "further apart", "/b1/3"):
        assert text in page


def test_final_annotations_are_what_was_adjudicated_and_what_both_agree_on(tmp_path: Path) -> None:
    found = audit(tmp_path)
    write_audit(tmp_path / "out", found)
    final = read_annotations(tmp_path / "out" / "final.jsonl")
    assert found.adjudication is not None
    assert final.answers == {**found.adjudication.final, "b1": CANNOT_SAY}
    who = {name: own.annotator for name, own in final.annotations.items()}
    assert who == {**dict.fromkeys(("a1", "b2"), "anna, ben"), **dict.fromkeys(("a2", "b1", "c1", "c2", "e1"), "carla")}

    write_audit(tmp_path / "set", audit(tmp_path, second=False))
    final = read_annotations(tmp_path / "set" / "final.jsonl")
    assert final.annotations["a1"].annotator == "anna, labels of the set"
    write_audit(tmp_path / "none", audit(tmp_path, final=False))
    assert not (tmp_path / "none" / "final.jsonl").exists()


def test_foreign_text_stays_text(tmp_path: Path) -> None:
    own = run(NASTY, instruction=NASTY)
    a = written(tmp_path / "a.jsonl", note(own, 1, NASTY, NASTY))
    b = written(tmp_path / "b.jsonl", note(own, None, NASTY))
    found = compare_labels(a, b, trajectories={NASTY: own}, resamples=10)
    write_audit(tmp_path, found, {NASTY: own})
    page = (tmp_path / "audit.html").read_text()
    assert "<script" not in page
    assert "<b>&" not in page
    assert "\u202e" not in page + render_audit(found)
    assert "{{ 7 * 7 }}" in page


def test_one_file_is_not_two_people(tmp_path: Path) -> None:
    own = run("a", first=1)
    anna, ben = written(tmp_path / "a.jsonl", note(own, 1)), written(tmp_path / "b.jsonl", note(own, 1, "ben"))
    compare_labels(anna, ben)  # two people may well agree
    with pytest.raises(AuditError, match="hold the same annotations, expected those of two people"):
        compare_labels(anna, read_annotations(tmp_path / "a.jsonl"))
