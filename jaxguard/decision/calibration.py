"""A calibration: thresholds with everything they are valid for, and nothing else.

The thresholds of a guard hold for one encoder, one set of weights and one fusion. A
:class:`Calibration` carries the fingerprints of all three and refuses any others.
"""

from __future__ import annotations

import bisect
import itertools
import json
import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from jaxguard.decision.conformal import (
    Band,
    Threshold,
    conformal_threshold,
    false_alert_band,
    group_thresholds,
    threshold_for,
)
from jaxguard.decision.evidence import FusionParams
from jaxguard.decision.policy import Cutoffs
from jaxguard.types import JaxguardError

VERSION = 2


class CalibrationError(JaxguardError):
    """A calibration that cannot be made, read, or used with what it meets."""


@dataclass(frozen=True)
class Calibration:
    """Thresholds and what they are valid for.

    Attributes:
        block: Threshold on the hazard risk, from the stricter budget.
        hold: Threshold on the fused risk.
        fusion: Parameters of the evidence and the noisy-or that the thresholds were set for.
        encoder: Fingerprint of the encoder.
        weights: Fingerprint of the model weights.
        group_key: Metadata field whose value selects a group's thresholds; ``""`` without groups.
        block_groups: Block thresholds of the groups that are large enough.
        hold_groups: Hold thresholds of the groups that are large enough.
        block_too_small: Sizes of the groups that use the pooled block threshold.
        hold_too_small: Sizes of the groups that use the pooled hold threshold.
        block_maxima: Sorted hazard maxima of the calibration trajectories, finite ones only (n says how
            many there were): what thresholds at other levels need.
        hold_maxima: Sorted fused maxima, likewise.
        either_alert_rate: Share of the calibration trajectories that cross either pooled threshold.
        nonfinite: Calibration trajectories with a score that is not finite.
        provenance: Where the calibration data came from; JSON-like.
    """

    block: Threshold
    hold: Threshold
    fusion: FusionParams
    encoder: str
    weights: str
    group_key: str = ""
    block_groups: Mapping[str, Threshold] = field(default_factory=dict)
    hold_groups: Mapping[str, Threshold] = field(default_factory=dict)
    block_too_small: Mapping[str, int] = field(default_factory=dict)
    hold_too_small: Mapping[str, int] = field(default_factory=dict)
    block_maxima: tuple[float, ...] = ()
    hold_maxima: tuple[float, ...] = ()
    either_alert_rate: float = 0.0
    nonfinite: int = 0
    provenance: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.block.alpha > self.hold.alpha:
            raise CalibrationError(
                f"alpha_block: got {self.block.alpha:g}, expected at most alpha_hold = {self.hold.alpha:g}: "
                "BLOCK has the stricter false-alert budget"
            )
        if self.block.strict != self.hold.strict:
            raise CalibrationError("rule: block and hold thresholds use different rules, expected one")
        if self.block.n != self.hold.n:
            raise CalibrationError(f"block.n: got {self.block.n}, expected hold.n = {self.hold.n}")
        for name, pooled, groups, maxima in (
            ("block", self.block, self.block_groups, self.block_maxima),
            ("hold", self.hold, self.hold_groups, self.hold_maxima),
        ):
            _check_maxima(name, maxima, pooled, self.nonfinite)
            _check_threshold(name, pooled, pooled, maxima)
            for key, threshold in groups.items():
                _check_threshold(f"{name}_groups[{key!r}]", threshold, pooled, maxima)

    @property
    def lambda_block(self) -> float:
        """Pooled threshold on the hazard risk."""
        return self.block.value

    @property
    def lambda_hold(self) -> float:
        """Pooled threshold on the fused risk."""
        return self.hold.value

    @property
    def n(self) -> int:
        """Safe calibration trajectories."""
        return self.hold.n

    @property
    def paper_rule(self) -> bool:
        """True where k was clipped to n and >= alerts."""
        return not self.hold.strict

    @property
    def nested(self) -> bool:
        """True where every BLOCK also crosses the hold threshold, so that HOLD's budget covers all alerts."""
        thresholds = {key: self.for_group(key) for key in {*self.block_groups, *self.hold_groups}}
        return self.fusion.w_hazard >= 1.0 and all(
            cut.block >= cut.hold for cut in (self.for_group(None), *thresholds.values())
        )

    @property
    def alpha_any(self) -> float:
        """Nominal level of *any* alert: alpha_hold where alerts are nested, else the union bound."""
        return self.hold.alpha if self.nested else min(1.0, self.hold.alpha + self.block.alpha)

    def for_group(self, group: str | None) -> Cutoffs:
        """Thresholds for a trajectory of this group; unknown, small or no group: the pooled ones."""
        return Cutoffs(
            threshold_for(group, self.block_groups, self.block).value,
            threshold_for(group, self.hold_groups, self.hold).value,
            self.hold.strict,
        )

    def for_metadata(self, metadata: Mapping[str, Any]) -> Cutoffs:
        """Thresholds for a trajectory with this metadata."""
        value = metadata.get(self.group_key) if self.group_key else None
        return self.for_group(None if value is None else str(value))

    def hold_at(self, alpha: float) -> Threshold:
        """The pooled hold threshold that the same calibration trajectories give at another level.

        Raises:
            ConformalError: They are too few for it.
        """
        missing = (math.inf,) * (self.hold.n - len(self.hold_maxima))
        return conformal_threshold((*self.hold_maxima, *missing), alpha, paper_rule=self.paper_rule)

    def raised(self, block: float, hold: float) -> Calibration:
        """With every threshold at least ``block`` and ``hold`` (:mod:`jaxguard.decision.margin`)."""
        return replace(
            self,
            block=self.block.at_least(block),
            hold=self.hold.at_least(hold),
            block_groups={key: value.at_least(block) for key, value in self.block_groups.items()},
            hold_groups={key: value.at_least(hold) for key, value in self.hold_groups.items()},
        )

    def band(self, level: float = 0.95) -> tuple[Band, Band]:
        """Exact law of the achieved false-alert level of (block, hold): mean and central interval."""
        return (
            false_alert_band(self.block.n, self.block.k, level),
            false_alert_band(self.hold.n, self.hold.k, level),
        )

    def check(self, *, encoder: str, weights: str, fusion: FusionParams | None = None) -> None:
        """Refuses anything but what the thresholds were set for.

        Raises:
            CalibrationError: Names the part that differs, what was found and what was expected.
        """
        found = {"encoder": encoder, "weights": weights}
        expected = {"encoder": self.encoder, "weights": self.weights}
        if fusion is not None:
            found["fusion"], expected["fusion"] = fusion.fingerprint, self.fusion.fingerprint
        for part, value in found.items():
            if value != expected[part]:
                raise CalibrationError(
                    f"calibration: {part} fingerprint is {value!r}, expected {expected[part]!r}: these "
                    f"thresholds were set for another {part} and say nothing here; calibrate again"
                )

    def to_json(self) -> str:
        """As text, every number finite; raises CalibrationError where the provenance holds anything else."""
        try:
            return json.dumps({"version": VERSION, **asdict(self)}, indent=2, sort_keys=True, allow_nan=False)
        except (TypeError, ValueError) as error:
            raise CalibrationError(f"provenance: {error}, expected JSON-like values") from None

    @classmethod
    def from_json(cls, text: str) -> Calibration:
        """Reads :meth:`to_json`.

        Raises:
            CalibrationError: Not JSON, another version, a missing or unknown field, or a value that is not
                finite or of the wrong kind.
        """
        try:
            record = json.loads(text, parse_constant=_refuse_constant)
        except (ValueError, RecursionError) as error:
            raise CalibrationError(f"calibration: not JSON ({error}), expected the text of a calibration") from None
        if not isinstance(record, dict):
            raise CalibrationError(f"calibration: got {type(record).__name__}, expected a JSON object")
        version = record.pop("version", None)
        if version != VERSION:
            raise CalibrationError(f"calibration: version is {version!r}, expected {VERSION}; calibrate again")
        _check_fields("calibration", record, cls)
        for name in ("block", "hold"):
            record[name] = _threshold(name, record[name])
            groups = record[f"{name}_groups"]
            record[f"{name}_groups"] = {
                key: _threshold(f"{name}_groups[{key!r}]", value) for key, value in _mapping(name, groups).items()
            }
        fusion = _mapping("fusion", record["fusion"])
        _check_fields("fusion", fusion, FusionParams)
        _check_numbers("fusion", fusion)
        record["fusion"] = FusionParams(**fusion)
        for name in ("block_too_small", "hold_too_small"):
            record[name] = _mapping(name, record[name])
            _check_numbers(name, record[name])
        _check_numbers("calibration", {name: record[name] for name in ("either_alert_rate", "nonfinite")})
        if type(record["nonfinite"]) is not int or not 0 <= record["either_alert_rate"] <= 1:
            raise CalibrationError(
                f"calibration: nonfinite is {record['nonfinite']!r} and either_alert_rate "
                f"{record['either_alert_rate']!r}, expected a count and a share in [0, 1]"
            )
        for name in ("block_maxima", "hold_maxima"):
            if not isinstance(record[name], list):
                raise CalibrationError(f"calibration: {name} is {record[name]!r:.40}, expected a list")
            _check_numbers(name, {str(i): value for i, value in enumerate(record[name])})
            record[name] = tuple(record[name])
        record["provenance"] = _mapping("provenance", record["provenance"])
        for name in ("encoder", "weights", "group_key"):
            if not isinstance(record[name], str):
                raise CalibrationError(f"calibration: {name} is {record[name]!r}, expected text")
        return cls(**record)


def calibrate(
    hazard_maxima: ArrayLike,
    fused_maxima: ArrayLike,
    *,
    alpha_hold: float,
    alpha_block: float,
    fusion: FusionParams,
    encoder: str,
    weights: str,
    groups: Sequence[Hashable | None] | None = None,
    group_key: str = "",
    min_group: int = 1,
    paper_rule: bool = False,
    provenance: Mapping[str, Any] | None = None,
) -> Calibration:
    """Sets both thresholds from *safe* calibration trajectories.

    Args:
        hazard_maxima: ``[n]`` maximum hazard risk over the steps of each safe trajectory
            (:func:`~jaxguard.decision.evidence.trajectory_max`; 0 without steps).
        fused_maxima: ``[n]`` maximum fused risk of the same trajectories.
        alpha_hold: False-alert budget of HOLD, per trajectory.
        alpha_block: Stricter budget of BLOCK.
        fusion: Parameters that ``fused_maxima`` were made with.
        encoder: Encoder fingerprint.
        weights: Weights fingerprint.
        groups: ``[n]`` group of each trajectory for Mondrian thresholds, ``None`` for those without.
        group_key: Metadata field that the groups are the values of; required with ``groups``.
        min_group: Groups smaller than this use the pooled threshold even where a rank exists.
        paper_rule: Clip k to n and alert on >=; no finite-sample guarantee.
        provenance: Kept with the calibration.

    Raises:
        ConformalError: Too few trajectories for a level, with the number it needs.
        CalibrationError: Arrays disagree, alpha_block > alpha_hold, or so many maxima are 1 that nothing could alert.
    """
    hazard = np.asarray(hazard_maxima, dtype=np.float64)
    fused = np.asarray(fused_maxima, dtype=np.float64)
    if hazard.shape != fused.shape:
        raise CalibrationError(f"fused_maxima: got shape {fused.shape}, expected that of hazard, {hazard.shape}")
    if (groups is None) != (not group_key):
        raise CalibrationError("groups and group_key: got only one of them, expected both or neither")
    block = conformal_threshold(hazard, alpha_block, paper_rule=paper_rule)
    hold = conformal_threshold(fused, alpha_hold, paper_rule=paper_rule)
    _refuse_saturated("block risk", hazard, block)
    _refuse_saturated("hold risk", fused, hold)
    tables: dict[str, Any] = {}
    if groups is not None:
        if len(groups) != len(hazard):
            raise CalibrationError(f"groups: got {len(groups)} keys, expected one for each of {len(hazard)} maxima")
        at = [i for i, key in enumerate(groups) if key is not None]
        keys = [str(groups[i]) for i in at]
        for name, maxima, alpha in (("block", hazard, alpha_block), ("hold", fused, alpha_hold)):
            tables[f"{name}_groups"], tables[f"{name}_too_small"] = group_thresholds(
                maxima[at], keys, alpha, min_size=min_group, paper_rule=paper_rule
            )
            for key, threshold in tables[f"{name}_groups"].items():
                members = maxima[[i for i, group in zip(at, keys, strict=True) if group == key]]
                _refuse_saturated(f"{name} risk, {group_key} {key!r}", members, threshold)
    return Calibration(
        block,
        hold,
        fusion,
        encoder,
        weights,
        group_key=group_key,
        block_maxima=tuple(np.sort(hazard[np.isfinite(hazard)]).tolist()),
        hold_maxima=tuple(np.sort(fused[np.isfinite(fused)]).tolist()),
        either_alert_rate=float((block.crossed(hazard) | hold.crossed(fused)).mean()),
        nonfinite=int((~np.isfinite(fused) | ~np.isfinite(hazard)).sum()),
        provenance=dict(provenance or {}),
        **tables,
    )


def _refuse_saturated(name: str, maxima: np.ndarray, threshold: Threshold) -> None:
    """Refuses a threshold of 1: no risk is greater, so that the guard would pass everything without a word."""
    if threshold.strict and threshold.value >= 1.0:
        raise CalibrationError(
            f"{name}: {int((maxima >= 1.0).sum())} of {len(maxima)} safe calibration trajectories have a maximum of 1, "
            f"expected at most {threshold.n - threshold.k} for alpha = {threshold.alpha:g}: the threshold would be 1, "
            "which no risk exceeds; the model is saturated"
        )


def _check_maxima(name: str, maxima: Sequence[float], pooled: Threshold, nonfinite: int) -> None:
    """Stored maxima are sorted risks, one for each calibration trajectory with finite scores."""
    if not maxima:
        return
    if any(low > high for low, high in itertools.pairwise(maxima)) or maxima[0] < 0 or maxima[-1] > 1:
        raise CalibrationError(f"{name}_maxima: got numbers out of order or range, expected sorted risks in [0, 1]")
    if not 0 <= pooled.n - len(maxima) <= nonfinite or len(maxima) < pooled.k:
        raise CalibrationError(
            f"{name}_maxima: got {len(maxima)} numbers, expected {pooled.n} less at most {nonfinite} not finite"
        )


def _check_threshold(name: str, threshold: Threshold, pooled: Threshold, maxima: Sequence[float]) -> None:
    """A threshold is a risk that can be crossed, under the pooled one's rule and level, and one of the maxima."""
    if (threshold.strict, threshold.alpha) != (pooled.strict, pooled.alpha) or threshold.n > pooled.n:
        raise CalibrationError(
            f"{name}: got alpha = {threshold.alpha:g}, strict = {threshold.strict}, n = {threshold.n}, expected "
            f"{pooled.alpha:g}, {pooled.strict} and at most {pooled.n}"
        )
    found = threshold.conformal.value
    if found < 0 or threshold.value > 1 or (threshold.strict and threshold.value == 1):
        raise CalibrationError(
            f"{name}: got a threshold of {threshold.value!r} (conformal {found!r}), expected risks in [0, 1] that can "
            "be crossed"
        )
    if not maxima:
        return
    at = pooled.k - 1 if threshold is pooled else min(bisect.bisect_left(maxima, found), len(maxima) - 1)
    if maxima[at] != found:
        expected = f"{maxima[at]!r}, number {pooled.k} of the maxima" if threshold is pooled else "one of the maxima"
        raise CalibrationError(f"{name}: got a conformal threshold of {found!r}, expected {expected}")


def _refuse_constant(name: str) -> float:
    raise CalibrationError(f"calibration: found {name}, expected finite numbers only")


def _mapping(name: str, value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise CalibrationError(f"calibration: {name} is {type(value).__name__}, expected a JSON object")
    return dict(value)


def _check_fields(name: str, record: Mapping[str, Any], cls: Any) -> None:
    expected = {f.name for f in fields(cls)}
    if record.keys() != expected:
        missing, unknown = sorted(expected - record.keys()), sorted(record.keys() - expected)
        raise CalibrationError(f"{name}: missing fields {missing}, unknown fields {unknown}, expected neither")


def _check_numbers(name: str, record: Mapping[str, Any]) -> None:
    for key, value in record.items():
        # An integer beyond the range of floats is finite, and nothing can be calculated with it.
        huge = isinstance(value, int) and value.bit_length() > 63
        if isinstance(value, bool) or not isinstance(value, int | float) or huge or not math.isfinite(value):
            raise CalibrationError(f"{name}.{key}: got {value!r:.40}, expected a finite number")


def _threshold(name: str, value: Any) -> Threshold:
    record = _mapping(name, value)
    _check_fields(name, record, Threshold)
    strict = record.pop("strict")
    if not isinstance(strict, bool):
        raise CalibrationError(f"{name}.strict: got {strict!r}, expected true or false")
    raised_from = record.pop("raised_from")
    for count in ("n", "k"):
        if type(record[count]) is not int:
            raise CalibrationError(f"{name}.{count}: got {record[count]!r:.40}, expected an integer")
    _check_numbers(name, record if raised_from is None else record | {"raised_from": raised_from})
    return Threshold(**record, strict=strict, raised_from=raised_from)
