"""The guard: encoder, world model and decision as one bundle, for archives and for live sessions."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import logging
import math
import os
import tempfile
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file

from jaxguard.config import Config
from jaxguard.decision.calibration import Calibration
from jaxguard.decision.evidence import EvidenceState, advance
from jaxguard.decision.policy import Mode, decide_step
from jaxguard.decision.scored import ScoredTrajectory, judge
from jaxguard.features.encoder import Encoder, load_encoder
from jaxguard.features.fingerprint import EncoderFingerprint
from jaxguard.features.store import FeatureStore
from jaxguard.features.texts import action_text, trajectory_texts, well_formed
from jaxguard.settings import from_dict, to_dict
from jaxguard.traces.readers.calls import parse_arguments
from jaxguard.types import Decision, JaxguardError, Step, Trajectory, Verdict
from jaxguard.versions import versions
from jaxguard.world_model import packing
from jaxguard.world_model.params import Params, ParamsError, flatten, unflatten, weights_hash
from jaxguard.world_model.scorer import LiveState, Scorer

BUNDLE_VERSION = 3
logger = logging.getLogger(__name__)


class GuardError(JaxguardError):
    """A bundle cannot be written or read, or a session was used in a way it forbids."""


class _TextVectors:
    """Vectors of texts made on the spot: what scores trajectories without a feature store."""

    def __init__(self, encoder: Encoder):
        self._encoder = encoder
        self._index: dict[str, int] = {}
        self._table: list[np.ndarray] = []

    def rows(self, texts: Sequence[str]) -> np.ndarray:
        new = [text for text in dict.fromkeys(texts) if text not in self._index]
        if new:
            first = len(self._table)
            self._table.extend(self._encoder.encode(new))
            self._index.update((text, first + i) for i, text in enumerate(new))
        return np.array([self._index[text] for text in texts], np.int64)

    def gather(self, rows: np.ndarray) -> np.ndarray:
        flat = rows.reshape(-1)
        vectors = np.stack([self._table[i] for i in flat]) if flat.size else np.empty((0, self._encoder.dim))
        return vectors.reshape(*rows.shape, -1).astype(np.float32, copy=False)


def _fingerprint(params: Params, config: Config) -> str:
    """Names everything of the model that moves a score: the weights, how they are used, and what they read."""
    use = json.dumps([to_dict(config.model), config.data.thought], sort_keys=True)
    return hashlib.sha256(f"{weights_hash(params)} {use}".encode()).hexdigest()[:16]


@dataclass
class Guard:
    """A trained world model with the encoder it reads and the thresholds it was calibrated to.

    Attributes:
        config: The experiment that made it; sizes, encoder settings and whether thoughts are read.
        params: Weights.
        encoder: The frozen encoder.
        calibration: Thresholds; ``None`` before calibration (then there are risks but no decisions).
        provenance: Where weights and data came from; JSON-like.
    """

    config: Config
    params: Params
    encoder: Encoder
    calibration: Calibration | None = None
    provenance: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.encoder.dim != self.config.model.embed_dim:
            raise GuardError(
                f"model.embed_dim is {self.config.model.embed_dim}, but the encoder {self.encoder.fingerprint} "
                f"makes {self.encoder.dim} values per text"
            )
        self.weights = _fingerprint(self.params, self.config)
        self._scorer: Scorer | None = None
        if self.calibration is not None:
            self.calibration.check(encoder=self.encoder.fingerprint.short, weights=self.weights)

    @property
    def scorer(self) -> Scorer:
        """The compiled scorer, made when first needed."""
        if self._scorer is None:
            self._scorer = Scorer(self.config.model, self.params)
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
        vectors = _TextVectors(self.encoder) if store is None else store
        held: dict[int, Trajectory] = {}

        def every() -> Iterator[packing.Texts]:
            for position, trajectory in enumerate(trajectories):
                held[position] = trajectory
                texts = trajectory_texts(trajectory, thought=self.config.data.thought)
                yield texts.observations[:-1], texts.actions, texts.instruction

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
        target = Path(path)
        target.parent.mkdir(parents=True, exist_ok=True)
        if target.exists() and not (target / "guard.json").exists():
            raise GuardError(f"guard bundle {target}: exists and is not a bundle; name another folder")
        thresholds = None if self.calibration is None else self.calibration.to_json().encode()
        description = {
            "jaxguard_bundle": BUNDLE_VERSION,
            "config": to_dict(self.config),
            "encoder": self.encoder.fingerprint.to_dict(),
            "weights": self.weights,
            "calibration": None if thresholds is None else _digest(thresholds),
            "versions": versions(),
            "provenance": self.provenance,
        }
        try:
            text = json.dumps(description, indent=2, sort_keys=True)
        except (TypeError, ValueError) as error:
            raise GuardError(f"provenance: {error}, expected JSON-like values") from None
        with tempfile.TemporaryDirectory(prefix=f".{target.name}-", dir=target.parent) as scratch:
            made, replaced = Path(scratch) / "made", Path(scratch) / "replaced"
            made.mkdir()
            try:
                save_file(flatten(self.params), made / "weights.safetensors")
            except SafetensorError as error:  # a full disk, say
                raise GuardError(f"guard bundle {target}: weights cannot be written ({error})") from error
            if thresholds is not None:
                (made / "calibration.json").write_bytes(thresholds)
            (made / "guard.json").write_text(text, encoding="utf-8")
            try:
                if target.exists():
                    target.rename(replaced)
                made.rename(target)
            except BaseException:
                if replaced.exists() and not target.exists():  # or it would go with the scratch folder
                    replaced.rename(target)
                raise

    @classmethod
    def load(cls, path: str | os.PathLike[str], encoder: Encoder | None = None) -> Guard:
        """Reads a bundle.

        Args:
            path: Folder that :meth:`save` wrote.
            encoder: Used instead of making the one that the bundle names; must have its fingerprint.

        Raises:
            GuardError: no bundle there, another bundle version, damaged, or another encoder.
        """
        folder = Path(path)
        description = _description(folder)
        try:
            config = from_dict(description["config"], Config)
            expected = EncoderFingerprint.from_dict(description["encoder"])
            encoder = load_encoder(config.encoder) if encoder is None else encoder
        except JaxguardError as error:
            raise GuardError(f"guard bundle {folder}: {error}") from error
        if encoder.fingerprint != expected:
            raise GuardError(
                f"guard bundle {folder}: was made for another encoder than the one at hand "
                f"({expected.differences(encoder.fingerprint)})"
            )
        try:
            params = unflatten(load_file(folder / "weights.safetensors"), config.model)
        # What safetensors raises for a dtype that NumPy lacks depends on the dtype.
        except (OSError, SafetensorError, ParamsError, LookupError, TypeError, ValueError, AttributeError) as error:
            raise GuardError(f"guard bundle {folder}: weights.safetensors cannot be read ({_reason(error)})") from error
        if _fingerprint(params, config) != description["weights"]:
            raise GuardError(f"guard bundle {folder}: weights.safetensors and guard.json do not belong together")
        calibration = _thresholds(folder, description["calibration"])
        try:
            return cls(config, params, encoder, calibration, description["provenance"])
        except JaxguardError as error:
            raise GuardError(f"guard bundle {folder}: {error}") from error


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def _reason(error: Exception) -> str:
    return str(error) if isinstance(error, OSError | JaxguardError) else f"{type(error).__name__}: {error}"


def _description(folder: Path) -> dict[str, Any]:
    """``guard.json`` of a bundle, with every part that loading needs."""
    try:
        description = json.loads((folder / "guard.json").read_text(encoding="utf-8"))
    except FileNotFoundError:
        run = (
            "; that is a run, its bundle is " + str(folder / "guard")
            if (folder / "guard" / "guard.json").exists()
            else ""
        )
        raise GuardError(
            f"guard bundle {folder}: no guard.json there, expected a bundle that jaxguard wrote{run}"
        ) from None
    except (OSError, ValueError, RecursionError) as error:
        raise GuardError(f"guard bundle {folder}: guard.json cannot be read ({_reason(error)})") from error
    found = description.get("jaxguard_bundle") if isinstance(description, dict) else None
    if type(found) is not int or found != BUNDLE_VERSION:
        raise GuardError(
            f"guard bundle {folder}: version is {found!r:.40}, this jaxguard reads version {BUNDLE_VERSION}; delete it "
            "and make it anew (`jaxguard train`, with --fresh where its checkpoints are as old)"
        )
    if missing := {"config", "encoder", "weights", "calibration", "provenance"} - description.keys():
        raise GuardError(f"guard bundle {folder}: guard.json lacks {', '.join(sorted(missing))}")
    for name in ("config", "encoder", "provenance"):
        if not isinstance(description[name], dict):
            raise GuardError(
                f"guard bundle {folder}: {name} in guard.json is {description[name]!r:.80}, expected an object"
            )
    return description


def _thresholds(folder: Path, digest: object) -> Calibration | None:
    """The thresholds of a bundle, if any: those that were written with its ``guard.json``, and no others."""
    path = folder / "calibration.json"
    if not path.exists():
        return None  # nothing passes without thresholds
    try:
        content = path.read_bytes()
        calibration = Calibration.from_json(content.decode("utf-8"))
    except (OSError, UnicodeDecodeError, JaxguardError) as error:
        raise GuardError(f"guard bundle {folder}: calibration.json cannot be read ({error})") from error
    if _digest(content) != digest:
        raise GuardError(
            f"guard bundle {folder}: calibration.json is not the file that guard.json was written with; delete it and "
            "run `jaxguard calibrate` again"
        )
    return calibration


@dataclass(frozen=True)
class _Checked:
    """A check that was made: what was asked, what was answered, and the states a commit moves to."""

    digest: str
    verdict: Verdict
    state: LiveState | None
    evidence: EvidenceState | None


def _require_text(name: str, value: object) -> None:
    if not isinstance(value, str):
        raise GuardError(f"{name}: got {type(value).__name__}, expected text")


def _require_call_id(value: object) -> None:
    """Other kinds could equal the number of a step, which stands for a missing id."""
    if not (value is None or isinstance(value, str)):
        raise GuardError(f"call_id: got {type(value).__name__}, expected text or None")


class Session:
    """Verdicts for one running agent: ``check`` before a call, ``commit`` when it goes ahead.

    Checking changes nothing, however often it is done; only a commit moves the state. Both are idempotent
    by call id, because agent hosts retry their hooks. Methods may be called from several threads.

    A failure while scoring yields HOLD with ``Verdict.error``, never an exception that a host could take
    for consent; a misuse (an unknown call id, another call under a committed id) raises :class:`GuardError`.
    Of several calls checked under one id, the last is the one that a commit stands for.
    """

    def __init__(self, guard: Guard, instruction: str, metadata: Mapping[str, Any], mode: Mode):
        self._guard = guard
        self._calibration = guard._calibration()
        if not isinstance(metadata, Mapping):
            raise GuardError(f"metadata: got {type(metadata).__name__}, expected a mapping or None")
        self._cutoffs = self._calibration.for_metadata(metadata)
        if mode not in list(Mode):
            raise GuardError(f"mode: got {mode!r:.80}, expected one of {', '.join(Mode)}")
        self._mode = Mode(mode)
        _require_text("instruction", instruction)
        self._instruction = well_formed(instruction)
        self._state: LiveState | None = None  # made by the first check, so that its failure is held too
        self._evidence = EvidenceState()
        self._steps = 0
        # By call id; where the host gives none, by the number of the step, which no id equals.
        self._pending: dict[str | int, _Checked] = {}
        self._committed: dict[str | int, _Checked] = {}
        self._lock = threading.Lock()

    @property
    def steps(self) -> int:
        """Committed steps so far."""
        return self._steps

    def check(
        self,
        observation: str,
        tool: str,
        arguments: Mapping[str, Any] | str | None = None,
        *,
        call_id: str | None = None,
        thought: str = "",
    ) -> Verdict:
        """The verdict on a proposed call; nothing changes.

        Args:
            observation: What became visible since the last committed call was proposed; ``""`` if nothing,
                and for every further call of one turn the same text as for its first.
            tool: Name of the tool.
            arguments: The call's JSON object, or its text, which is parsed as the readers of traces do.
            call_id: The host's id of this call; defaults to the position of the step.
            thought: Read only by guards that were trained with thoughts.

        Raises:
            GuardError: ``call_id`` is committed with another observation, tool or arguments, or is not text; or
                observation, tool or thought is not text, or arguments are neither an object nor text.
        """
        for name, value in (("observation", observation), ("tool", tool), ("thought", thought)):
            _require_text(name, value)
        if not (arguments is None or isinstance(arguments, str | Mapping)):
            raise GuardError(f"arguments: got {type(arguments).__name__}, expected a mapping, text or None")
        _require_call_id(call_id)
        texts, problem = [well_formed(observation)], ""
        try:
            parsed, raw = parse_arguments(dict(arguments) if isinstance(arguments, Mapping) else arguments)
            step = Step(tool, parsed, call_id or "", observation, raw_arguments=raw, thought=thought)
            texts.append(action_text(step, thought=self._guard.config.data.thought))
        except JaxguardError as error:
            problem = str(error)
        except Exception as error:  # fail closed: a mapping of the host's own may raise anything
            logger.exception("reading the arguments of a proposed call to %r failed", tool)
            problem = f"arguments: cannot be read ({type(error).__name__}: {error})"
        if not tool.strip():
            problem = "tool: got an empty name, expected that of a tool"
        digest = hashlib.sha256(repr((tool, texts)).encode("utf-8", "surrogatepass")).hexdigest()
        with self._lock:
            key = self._steps if call_id is None else call_id
            known = self._committed.get(key)
            if known is not None:
                if known.digest != digest:
                    raise GuardError(f"call id {key!r}: was committed with another call; ids must not be reused")
                return known.verdict
            pending = self._pending.get(key)
            # A check that failed is made anew: what failed may have recovered.
            if pending is None or pending.digest != digest or pending.state is None:
                pending = self._held(digest, problem) if problem else self._score(tool, texts, digest)
                self._pending[key] = pending
            return pending.verdict

    def commit(self, call_id: str | None = None) -> None:
        """Moves on: the checked call is going to run. Committing the same id again changes nothing.

        Args:
            call_id: As given to :meth:`check`; may be left out where the checks left it out (then every
                commit needs a check of its own).

        Raises:
            GuardError: the call was not checked since the last commit, or its check failed to score (an
                observing session logs that and goes on); or ``call_id`` is not text.
        """
        _require_call_id(call_id)
        with self._lock:
            key = self._steps if call_id is None else call_id
            if key in self._committed:
                return
            checked = self._pending.get(key)
            if checked is None:
                raise GuardError(f"call id {key!r}: was not checked since the last commit; check it first")
            if checked.state is not None and checked.evidence is not None:
                self._state, self._evidence = checked.state, checked.evidence
            elif self._mode is Mode.FAIL_CLOSED:
                raise GuardError(f"call id {key!r}: could not be scored ({checked.verdict.error}); check it again")
            else:  # the host runs the call whatever the guard says: go on without having seen it
                logger.warning(
                    "call id %r ran unscored (%s): later verdicts do not know of it", key, checked.verdict.error
                )
            self._steps += 1
            self._committed[key] = dataclasses.replace(checked, state=None, evidence=None)
            self._pending.clear()

    def _score(self, tool: str, texts: Sequence[str], digest: str) -> _Checked:
        try:
            model = self._guard.scorer
            start = model.start(self._vectors([self._instruction])[0]) if self._state is None else self._state
            observation, action = self._vectors(texts, live=True)
            state, hazard, prefix = model.step(start, observation, action)
            if not (math.isfinite(hazard) and math.isfinite(prefix)):
                raise GuardError(f"world model: hazard {hazard} and prefix risk {prefix}, expected finite ones")
            evidence_state, evidence = advance(self._evidence, hazard, prefix, self._calibration.fusion)
        except Exception as error:  # fail closed: whatever went wrong, the call must not run unseen
            logger.exception("scoring a proposed call to %r failed", tool)
            return self._held(digest, f"{type(error).__name__}: {error}")
        self._state = start  # not before its step was scored: what failed must not stay
        decision, margin = decide_step(evidence.hazard, evidence.fused, self._cutoffs)
        verdict = self._verdict(decision, tuple(evidence), margin)
        return _Checked(digest, verdict, state, evidence_state)

    def _vectors(self, texts: Sequence[str], live: bool = False) -> np.ndarray:
        with np.errstate(over="ignore"):
            vectors = np.asarray(self._guard.encoder.encode(texts, live=live)).astype(np.float32, copy=False)
        if not np.isfinite(vectors).all():
            raise GuardError(f"encoder {self._guard.encoder.fingerprint}: returned a vector that is not finite")
        return vectors

    def _held(self, digest: str, error: str) -> _Checked:
        verdict = self._verdict(Decision.HOLD, (math.nan,) * 5, math.nan, error)
        return _Checked(digest, verdict, None, None)

    def _verdict(self, decision: Decision, risks: tuple[float, ...], margin: float, error: str = "") -> Verdict:
        observed = self._mode is Mode.OBSERVE and decision is not Decision.PASS
        hazard, prefix, ema, win, fused = risks
        return Verdict(self._steps, decision, hazard, prefix, ema, win, fused, margin, observed, error)
