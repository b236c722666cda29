"""The guard: encoder, world model and decision as one bundle, for archives and for live sessions."""

from __future__ import annotations

import dataclasses
import logging
import math
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jaxguard.bundles import WEIGHTS, Kind
from jaxguard.config import PRECISIONS, Config
from jaxguard.decision.calibration import Calibration
from jaxguard.decision.evidence import EvidenceState, advance
from jaxguard.decision.policy import Mode, decide_step
from jaxguard.decision.scored import ScoredTrajectory, judge
from jaxguard.features.characters import well_formed
from jaxguard.features.encoder import Encoder, load_encoder
from jaxguard.features.fingerprint import EncoderFingerprint
from jaxguard.features.grounding import EXCERPT_VERSION, Grounding
from jaxguard.features.shards import LARGEST_VALUE, usable
from jaxguard.features.store import FeatureStore
from jaxguard.features.texts import trajectory_texts
from jaxguard.sessions import Proposal, ScoringSession
from jaxguard.settings import from_dict, to_dict
from jaxguard.types import Decision, JaxguardError, Trajectory, Verdict
from jaxguard.world_model import packing
from jaxguard.world_model.params import Params, flatten, model_hash, unflatten
from jaxguard.world_model.scorer import LiveState, Scorer

logger = logging.getLogger(__name__)

HELD_TEXTS = 8
"""Texts whose vectors a live session keeps, about two calls' worth."""


class GuardError(JaxguardError):
    """A bundle cannot be written or read, or a session was used in a way it forbids."""


BUNDLE = Kind(
    name="guard",
    version=4,
    error=GuardError,
    remedy="delete it and make it anew (`jaxguard train`, with --fresh where its checkpoints are as old)",
    thresholds="calibration",
    command="jaxguard calibrate",
)


class LiveVectors:
    """Vectors of the texts of one call after the other.

    Encoding is nearly all that a live call costs: texts that are asked for again, by the other half of a joint session
    or by another check of the same call, are not encoded again.
    """

    def __init__(self, encoder: Encoder):
        self._encoder = encoder
        self._held: dict[tuple[str, bool], np.ndarray] = {}

    def __call__(self, texts: Sequence[str], *, live: bool = True) -> np.ndarray:
        """``[N, E]`` of texts of a call, or (not ``live``) of what is encoded once in a session.

        Raises:
            GuardError: the encoder returned others than N of its size, or one that is not finite, or beyond measure.
        """
        new = [text for text in dict.fromkeys(texts) if (text, live) not in self._held]
        if new:
            self._held.update(zip([(text, live) for text in new], self._encoded(new, live), strict=True))
        for text in texts:
            self._held[text, live] = self._held.pop((text, live))  # the latest come last
        vectors = np.stack([self._held[text, live] for text in texts])
        for key in list(self._held)[:-HELD_TEXTS]:
            del self._held[key]
        return vectors

    def _encoded(self, texts: Sequence[str], live: bool) -> np.ndarray:
        with np.errstate(over="ignore"):
            vectors = np.asarray(self._encoder.encode(texts, live=live)).astype(np.float32, copy=False)
        where = f"encoder {self._encoder.fingerprint}"
        if vectors.shape != (expected := (len(texts), self._encoder.dim)):
            raise GuardError(f"{where}: returned shape {vectors.shape}, expected {expected}")
        if not np.isfinite(vectors).all():
            raise GuardError(f"{where}: returned a vector that is not finite")
        if (largest := float(np.abs(vectors).max(initial=0.0))) > LARGEST_VALUE:
            raise GuardError(f"{where}: returned the value {largest:.3g}, expected {LARGEST_VALUE:g} at most")
        return vectors


class TextVectors:
    """Vectors of texts made on the spot: what scores trajectories without a feature store.

    One that a live session would refuse is NaN, so that whoever reads it is not scored.
    """

    def __init__(self, encoder: Encoder):
        self._encoder = encoder
        self._index: dict[str, int] = {}
        self._table: list[np.ndarray] = []

    def rows(self, texts: Sequence[str]) -> np.ndarray:
        new = [text for text in dict.fromkeys(texts) if text not in self._index]
        if new:
            first = len(self._table)
            with np.errstate(over="ignore"):
                vectors = np.array(self._encoder.encode(new), np.float32)
            vectors[~usable(vectors)] = np.nan
            self._table.extend(vectors)
            self._index.update((text, first + i) for i, text in enumerate(new))
        return np.array([self._index[text] for text in texts], np.int64)

    def gather(self, rows: np.ndarray) -> np.ndarray:
        flat = rows.reshape(-1)
        vectors = np.stack([self._table[i] for i in flat]) if flat.size else np.empty((0, self._encoder.dim))
        return vectors.reshape(*rows.shape, -1).astype(np.float32, copy=False)


@dataclass
class Guard:
    """A trained world model with the encoder it reads and the thresholds it was calibrated to.

    Attributes:
        config: The experiment that made it; sizes, encoder settings and whether thoughts are read.
        params: Weights.
        encoder: The frozen encoder.
        calibration: Thresholds; ``None`` before calibration (then there are risks but no decisions).
        provenance: Where weights and data came from; JSON-like.
        precision: Of the factors of products when trajectories are scored (:meth:`score`), ``"float32"`` or
            ``"bfloat16"``, which is faster on some hardware and decides otherwise where a risk is near a threshold.
            Live sessions always compute in float32.
    """

    config: Config
    params: Params
    encoder: Encoder
    calibration: Calibration | None = None
    provenance: Mapping[str, Any] = field(default_factory=dict)
    precision: str = PRECISIONS[0]

    def __post_init__(self) -> None:
        if self.precision not in PRECISIONS:
            raise GuardError(f"precision: got {self.precision!r}, expected one of {', '.join(PRECISIONS)}")
        if self.encoder.dim != self.config.model.embed_dim:
            raise GuardError(
                f"model.embed_dim is {self.config.model.embed_dim}, but the encoder {self.encoder.fingerprint} "
                f"makes {self.encoder.dim} values per text"
            )
        read = [EXCERPT_VERSION] if self.config.model.grounded else []
        self.weights = model_hash(self.params, self.config.model, self.config.data.thought, *read)
        self._scorer: Scorer | None = None
        if self.calibration is not None:
            self.calibration.check(encoder=self.encoder.fingerprint.short, weights=self.weights)

    @property
    def scorer(self) -> Scorer:
        """The compiled scorer, made when first needed."""
        if self._scorer is None:
            self._scorer = Scorer(self.config.model, self.params, precision=self.precision)
        return self._scorer

    def calibrated(self, calibration: Calibration) -> Guard:
        """The same guard with these thresholds; refused where they belong to another one."""
        guard = dataclasses.replace(self, calibration=calibration)
        guard._scorer = self._scorer
        return guard

    def risks(
        self, trajectories: Iterable[Trajectory], store: FeatureStore | None = None
    ) -> Iterator[tuple[int, Trajectory, np.ndarray]]:
        """Hazard and prefix risks ``[T, 2]`` of each trajectory as soon as it is done, with its position.

        Args:
            trajectories: Read lazily.
            store: Holds a vector for every text; without one, texts are encoded on the spot.

        Raises:
            JaxguardError: a text is not in ``store``, or ``store`` belongs to another encoder.
        """
        if store is not None and store.fingerprint != self.encoder.fingerprint:
            raise GuardError(
                f"feature store {store.path}: made by another encoder than this guard's "
                f"({store.fingerprint.differences(self.encoder.fingerprint)})"
            )
        vectors = TextVectors(self.encoder) if store is None else store
        held: dict[int, Trajectory] = {}

        def every() -> Iterator[packing.Texts]:
            for position, trajectory in enumerate(trajectories):
                held[position] = trajectory
                texts = trajectory_texts(
                    trajectory, thought=self.config.data.thought, grounded=self.config.model.grounded
                )
                yield packing.Texts(texts.observations[:-1], texts.actions, texts.said, texts.instruction)

        for position, risks in self.scorer.score(packing.sequences(every(), vectors.rows), vectors.gather):
            yield position, held.pop(position), risks

    def score(
        self, trajectories: Iterable[Trajectory], store: FeatureStore | None = None
    ) -> Iterator[ScoredTrajectory]:
        """Risks, evidence and decisions of each trajectory, in the order given.

        Raises:
            GuardError: the guard is not calibrated.
            JaxguardError: as :meth:`risks`.
        """
        calibration = self._calibration()
        done: dict[int, ScoredTrajectory] = {}
        following = 0
        for position, trajectory, risks in self.risks(trajectories, store):
            done[position] = judge([trajectory], risks[:, 0], risks[:, 1], calibration)[0]
            while following in done:
                yield done.pop(following)
                following += 1

    def session(
        self, instruction: str, metadata: Mapping[str, Any] | None = None, mode: Mode = Mode.FAIL_CLOSED
    ) -> Session:
        """A live session for one task; see :class:`Session`.

        Args:
            instruction: The task given to the agent.
            metadata: Selects group thresholds where the calibration has any.
            mode: Enforce decisions, or only observe.

        Raises:
            GuardError: an argument is not of its type, or the guard is not calibrated.
        """
        return Session(self, instruction, {} if metadata is None else metadata, mode)

    def _calibration(self) -> Calibration:
        if self.calibration is None:
            raise GuardError("guard: has no thresholds; run `jaxguard calibrate` first")
        return self.calibration

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the bundle folder: ``guard.json``, ``weights.safetensors``, ``calibration.json``.

        The folder appears complete or not at all; an existing bundle there is replaced, or stays where that fails.
        """
        description = {
            "config": to_dict(self.config),
            "encoder": self.encoder.fingerprint.to_dict(),
            "weights": self.weights,
            "provenance": self.provenance,
        }
        thresholds = None if self.calibration is None else self.calibration.to_json()
        weights = flatten(self.params)
        if self.config.train.half:  # exact: training rounded them
            weights = {name: array.astype(np.float16) for name, array in weights.items()}
        BUNDLE.write(Path(path), description, weights, thresholds)

    @classmethod
    def load(
        cls, path: str | os.PathLike[str], encoder: Encoder | None = None, precision: str = PRECISIONS[0]
    ) -> Guard:
        """Reads a bundle.

        Args:
            path: Folder that :meth:`save` wrote.
            encoder: Used instead of making the one that the bundle names; must have its fingerprint.
            precision: See :class:`Guard`; it is a choice of the caller and not part of the bundle.

        Raises:
            GuardError: no bundle there, another bundle version, damaged, or another encoder.
        """
        folder = Path(path)
        with BUNDLE.naming(folder):
            description = BUNDLE.read(folder)
            config = from_dict(description["config"], Config)
            expected = EncoderFingerprint.from_dict(description["encoder"])
            encoder = load_encoder(config.encoder) if encoder is None else encoder
            if encoder.fingerprint != expected:
                raise GuardError(
                    f"was made for another encoder than the one at hand ({expected.differences(encoder.fingerprint)})"
                )
            params = BUNDLE.read_weights(folder, lambda arrays: unflatten(arrays, config.model))
            guard = cls(config, params, encoder, provenance=description["provenance"], precision=precision)
            if guard.weights != description["weights"]:
                raise GuardError(f"{WEIGHTS} and {BUNDLE.file} do not belong together")
            calibration = BUNDLE.read_thresholds(folder, description["calibration"], Calibration.from_json)
            return guard if calibration is None else guard.calibrated(calibration)


class _After(NamedTuple):
    """What a session moves on to when a call runs."""

    world: LiveState
    evidence: EvidenceState
    observation: str


class Session(ScoringSession[Verdict, _After]):
    """Live verdicts of a guard; see :class:`~jaxguard.sessions.LiveSession`. A call that cannot be scored is HOLD."""

    misuse = GuardError

    def __init__(self, guard: Guard, instruction: str, metadata: Mapping[str, Any], mode: Mode):
        self._guard = guard
        self._calibration = guard._calibration()
        if not isinstance(metadata, Mapping):
            raise GuardError(f"metadata: got {type(metadata).__name__}, expected a mapping or None")
        self._cutoffs = self._calibration.for_metadata(metadata)
        super().__init__(mode, thought=guard.config.data.thought)
        self._require_text("instruction", instruction)
        self._instruction = well_formed(instruction)
        self._vectors = LiveVectors(guard.encoder)
        self._state: LiveState | None = None  # made by the first check, so that its failure is held too
        self._evidence = EvidenceState()
        self._seen = Grounding(escaped=True) if guard.config.model.grounded else None

    def _score(self, proposal: Proposal) -> tuple[Verdict, _After]:
        model = self._guard.scorer
        start = self._state
        if start is None:
            start = model.start(self._vectors([self._instruction], live=False)[0])
        said = [] if self._seen is None else [self._seen.excerpt(proposal.step)]
        observation, *action = self._vectors([proposal.observation, proposal.action, *said])
        state, hazard, prefix = model.step(start, observation, np.concatenate(action))
        if not (math.isfinite(hazard) and math.isfinite(prefix)):
            raise GuardError(f"world model: hazard {hazard} and prefix risk {prefix}, expected finite ones")
        evidence_state, evidence = advance(self._evidence, hazard, prefix, self._calibration.fusion)
        self._state = start  # not before its step was scored: what failed must not stay
        decision, margin = decide_step(evidence.hazard, evidence.fused, self._cutoffs)
        return self._verdict(decision, tuple(evidence), margin), _After(state, evidence_state, proposal.observation)

    def _adopt(self, state: _After) -> None:
        self._state, self._evidence = state.world, state.evidence
        if self._seen is not None:
            self._seen.add(state.observation)

    def _hold(self, error: str) -> Verdict:
        return self._verdict(Decision.HOLD, (math.nan,) * 5, math.nan, error)

    def _verdict(self, decision: Decision, risks: tuple[float, ...], margin: float, error: str = "") -> Verdict:
        observed = self._mode is Mode.OBSERVE and decision is not Decision.PASS
        hazard, prefix, ema, win, fused = risks
        return Verdict(self._steps, decision, hazard, prefix, ema, win, fused, margin, observed, error)
