"""Calibrations: what they hold, what they refuse, and that they survive a round trip."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest

from jaxguard.decision.calibration import Calibration, CalibrationError, calibrate
from jaxguard.decision.conformal import ConformalError, conformal_threshold, false_alert_band
from jaxguard.decision.evidence import FusionParams, evidence, trajectory_max
from jaxguard.decision.policy import Cutoffs
from jaxguard.types import JaxguardError

RNG = np.random.default_rng(11)
HAZARD, FUSED = RNG.random(120) * 0.7, RNG.random(120)
KEYS = ["mail"] * 60 + ["bank"] * 40 + [None] * 5 + ["rare"] * 15


def make(**changes) -> Calibration:
    settings = {
        "alpha_hold": 0.1,
        "alpha_block": 0.02,
        "fusion": FusionParams(),
        "encoder": "enc-1",
        "weights": "w-1",
        "groups": KEYS,
        "group_key": "domain",
        "provenance": {"ids": "abc"},
    }
    return calibrate(HAZARD, FUSED, **{**settings, **changes})


def test_thresholds_levels_and_band() -> None:
    c = make()
    assert c.lambda_hold == conformal_threshold(FUSED, 0.1).value
    assert c.lambda_block == conformal_threshold(HAZARD, 0.02).value
    assert (c.n, c.hold.k, c.block.k, c.paper_rule) == (120, 109, 119, False)
    block, hold = c.band(0.9)
    assert hold == false_alert_band(120, 109, 0.9)
    assert block.mean == pytest.approx(2 / 121)
    crossed = c.hold.crossed(FUSED) | c.block.crossed(HAZARD)
    assert c.either_alert_rate == pytest.approx(crossed.mean())


def test_groups_and_fallback() -> None:
    c = make()
    assert set(c.hold_groups) == {"mail", "bank", "rare"}
    assert set(c.block_groups) == {"mail"}
    assert c.block_too_small == {"bank": 40, "rare": 15}
    assert c.hold_groups["bank"] == conformal_threshold(FUSED[60:100], 0.1)
    assert c.for_group("bank") == Cutoffs(c.lambda_block, c.hold_groups["bank"].value, True)
    pooled = Cutoffs(c.lambda_block, c.lambda_hold, True)
    assert c.for_group("unseen") == c.for_group(None) == c.for_metadata({}) == pooled
    assert c.for_metadata({"domain": "bank"}) == c.for_group("bank")
    assert make(min_group=50).hold_too_small == {"bank": 40, "rare": 15}


def test_level_of_any_alert() -> None:
    apart = make(groups=None, group_key="")
    assert not apart.nested
    assert apart.alpha_any == pytest.approx(0.12)
    fused = np.maximum(HAZARD, FUSED * 0.1)
    nested = calibrate(HAZARD, fused, alpha_hold=0.1, alpha_block=0.02, fusion=FusionParams(), encoder="e", weights="w")
    assert nested.nested
    assert nested.alpha_any == 0.1
    assert nested.either_alert_rate <= 0.1


def test_trajectories_without_steps_count_as_zero() -> None:
    ev = evidence([0.3, 0.4], [0.1, 0.1], [0, 2, 0], FusionParams())
    assert trajectory_max(ev.hazard, [0, 2, 0]).tolist() == [0.0, 0.4, 0.0]


def test_refuses_other_fingerprints() -> None:
    c = make()
    c.check(encoder="enc-1", weights="w-1", fusion=FusionParams())
    with pytest.raises(CalibrationError, match=r"encoder fingerprint is 'enc-2', expected 'enc-1'"):
        c.check(encoder="enc-2", weights="w-1")
    with pytest.raises(CalibrationError, match="weights fingerprint is 'w-2'"):
        c.check(encoder="enc-1", weights="w-2")
    with pytest.raises(CalibrationError, match="fusion fingerprint"):
        c.check(encoder="enc-1", weights="w-1", fusion=FusionParams(beta=0.1))


def test_round_trip() -> None:
    for c in (make(), make(paper_rule=True), make(groups=None, group_key="")):
        back = Calibration.from_json(c.to_json())
        assert back == c
        assert back.to_json() == c.to_json()


def edited(path: str, value: object) -> str:
    record = json.loads(make().to_json())
    *parents, last = path.split(".")
    at = record
    for key in parents:
        at = at[key]
    at[last] = value
    return json.dumps(record)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "not JSON"),
        ("[]", "got list"),
        (edited("version", 1), "version is 1, expected 2"),
        (edited("version", None), "version is None"),
        (edited("hold.value", math.nan), "NaN"),
        (edited("block.value", math.inf), "Infinity"),
        (edited("hold.value", None), r"hold\.value: got None"),
        (edited("hold.value", "0.5"), r"hold\.value"),
        (edited("hold.strict", 1), "strict"),
        (edited("hold_groups.mail.value", None), "mail"),
        (edited("extra", 1), r"unknown fields \['extra'\]"),
        (edited("fusion", {"beta": 0.5}), "missing fields"),
        (edited("fusion.beta", None), r"fusion\.beta"),
        (edited("encoder", 3), "encoder is 3"),
        (edited("nonfinite", None), "nonfinite"),
        (edited("provenance", []), "provenance is list"),
        (edited("hold_maxima", [0.1, None]), r"hold_maxima\.1: got None"),
        (edited("hold_maxima", 0.1), r"hold_maxima is 0\.1"),
        (edited("block_too_small.rare", "x"), "rare"),
        (edited("hold.value", 1e9), r"^hold: got a threshold of 1000000000\.0 .*expected risks in \[0, 1\]"),
        (edited("block.value", -5), "^block: got a threshold of -5 "),
        (edited("hold.value", 1.0), r"^hold: got a threshold of 1\.0 .* that can be crossed"),
        (edited("hold.value", 0.999999), r"^hold: got a conformal threshold of 0\.999999, expected .*, number 109 of"),
        (edited("hold_groups.mail.value", 1e9), r"^hold_groups\['mail'\]: got a threshold of"),
        (edited("hold_groups.mail.value", 0.9), r"^hold_groups\['mail'\]: .* expected one of the maxima"),
        (edited("hold_groups.mail.alpha", 0.9), r"rank k = 55 of n = 60, expected 7 for alpha = 0\.9"),
        (edited("hold.raised_from", 2e-3), r"^hold: got a conformal threshold of 0\.002"),
        (edited("hold.raised_from", 0.99), "expected more than 0.99"),
        (edited("hold.k", 100), "got rank k = 100 of n = 120, expected 109 for alpha = 0.1"),
        (edited("hold.k", 109.0), r"hold\.k: got 109\.0, expected an integer"),
        (edited("hold.k", 10**400), r"hold\.k: got 10+, expected a finite number"),
        (edited("hold.alpha", 0.9), "expected 13 for alpha = 0.9"),
        (edited("hold.value", 10**400), r"hold\.value: got 10+, expected a finite number"),
        (edited("hold_maxima", [0.2, 0.1]), "hold_maxima: got numbers out of order"),
        (edited("block_maxima", [0.1, 7]), "block_maxima: got numbers out of order or range"),
        (edited("hold_maxima", [0.1] * 119), "hold_maxima: got 119 numbers, expected 120 less at most 0"),
        (edited("nonfinite", 0.5), r"nonfinite is 0\.5"),
        (edited("either_alert_rate", -1), "either_alert_rate.* -1"),
        (edited("fusion.window", 3.0), r"window: got 3\.0, expected an integer in 1\.\.10,000"),
        (edited("fusion.window", 1e30), r"window: got 1e\+30, expected an integer"),
        (edited("fusion.beta", 10**400), r"fusion\.beta: got 10+, expected a finite number"),
        ("[" * 100_000, "not JSON"),
        ('{"version": ' + "1" * 5000 + "}", "not JSON"),
    ],
)
def test_refuses_broken_text(text: str, message: str) -> None:
    with pytest.raises(JaxguardError, match=message):
        Calibration.from_json(text)


def test_refuses_broken_calls() -> None:
    with pytest.raises(CalibrationError, match=r"alpha_block: got 0\.2"):
        make(alpha_block=0.2)
    with pytest.raises(ConformalError, match="at least 199"):
        make(alpha_block=0.005)
    with pytest.raises(CalibrationError, match="got only one"):
        make(group_key="")
    with pytest.raises(CalibrationError, match="groups: got 2"):
        make(groups=["a", "b"])
    with pytest.raises(CalibrationError, match="fused_maxima: got shape"):
        calibrate([0.1], [0.1, 0.2], alpha_hold=0.5, alpha_block=0.5, fusion=FusionParams(), encoder="e", weights="w")
    with pytest.raises(CalibrationError, match="provenance"):
        make(provenance={"loss": math.nan}).to_json()


def test_nonfinite_calibration_trajectories_are_counted() -> None:
    fused = FUSED.copy()
    fused[7] = math.inf
    c = calibrate(HAZARD, fused, alpha_hold=0.1, alpha_block=0.02, fusion=FusionParams(), encoder="e", weights="w")
    assert c.nonfinite == 1
    assert c.hold_at(0.1) == c.hold


def test_thresholds_at_other_levels() -> None:
    c = Calibration.from_json(make().to_json())
    for alpha in (0.02, 0.05, 0.3):
        assert c.hold_at(alpha) == conformal_threshold(FUSED, alpha)
    with pytest.raises(ConformalError, match="at least 999"):
        c.hold_at(0.001)


def test_paper_rule_thresholds_are_checked_too() -> None:
    clipped = make(paper_rule=True, alpha_block=0.001, groups=None, group_key="")
    assert (clipped.block.k, clipped.block.value) == (120, HAZARD.max())
    record = json.loads(clipped.to_json())
    record["block"]["k"] = 119
    with pytest.raises(ConformalError, match=r"rank k = 119 of n = 120, expected 120 for alpha = 0\.001"):
        Calibration.from_json(json.dumps(record))


def test_raised_thresholds_survive_a_round_trip() -> None:
    raised = make().raised(0.75, 0.97)
    assert raised.hold.raised_from == make().hold.value
    assert Calibration.from_json(raised.to_json()) == raised


def test_a_saturated_model_is_refused() -> None:
    """A threshold of 1 would let everything pass in silence."""
    rest = {"alpha_hold": 0.1, "alpha_block": 0.05, "fusion": FusionParams(), "encoder": "e", "weights": "w"}
    ones = np.ones(40)
    with pytest.raises(CalibrationError, match=r"block risk: 40 of 40 safe .* maximum of 1, expected at most 1 for"):
        calibrate(ones, ones, **rest)
    some = np.where(np.arange(40) < 6, 1.0, 0.5)
    with pytest.raises(CalibrationError, match=r"hold risk: 6 of 40 .* expected at most 3 for alpha = 0\.1"):
        calibrate(some * 0.9, some, **rest)
    few = np.where(np.arange(40) < 3, 1.0, 0.5)
    assert calibrate(few * 0.9, few, **rest).lambda_hold == 0.5
    groups = ["bad"] * 6 + ["good"] * 60
    mixed = np.where(np.arange(66) < 6, 1.0, 0.5)
    with pytest.raises(CalibrationError, match=r"hold risk, domain 'bad': 6 of 6 safe calibration"):
        calibrate(mixed * 0.9, mixed, **rest | {"alpha_hold": 0.2}, groups=groups, group_key="domain")
    assert calibrate(ones, ones, **rest, paper_rule=True).hold.crossed([1.0]).all()
