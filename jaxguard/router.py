"""The router without a language model: encoder, world model, route head and tau as one bundle, and live sessions."""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from jaxguard.bundles import WEIGHTS, Kind
from jaxguard.decision.explain import explain, missing_arguments
from jaxguard.decision.policy import Mode
from jaxguard.decision.routing import Routing, route_step
from jaxguard.features.characters import well_formed
from jaxguard.features.encoder import Encoder, load_encoder
from jaxguard.features.fingerprint import EncoderFingerprint
from jaxguard.features.grounding import GROUNDING_VERSION, Grounding
from jaxguard.features.store import FeatureStore, MissingTexts
from jaxguard.guard import Guard, GuardError, LiveVectors, TextVectors
from jaxguard.route_config import RouteConfig
from jaxguard.sessions import Checked, LiveSession, Proposal, ScoringSession
from jaxguard.settings import from_dict, to_dict
from jaxguard.traces.snapshots import TRIGGERS
from jaxguard.training.episodes import bucket
from jaxguard.training.routing import RouteRows, RouteTextRows, pad_rows
from jaxguard.types import JointVerdict, Route, RouteVerdict, Step, Trajectory
from jaxguard.world_model.params import Params, ParamsError, flatten, model_hash, unflatten
from jaxguard.world_model.routing import LETTERS, OUTPUTS, ROUTES, RouteHead, RouteScorer, RouteState

# Padded steps of a batch, and trajectories in it: a batch of one bucket compiles once.
_STEPS, _ROWS = 4_096, 64
# Trajectories that are sorted by length together.
_AHEAD = 1_024


class RouterError(GuardError):
    """A router bundle cannot be written or read, or a session was used in a way it forbids."""


BUNDLE = Kind(
    name="router",
    version=2,
    error=RouterError,
    remedy="delete it and make it anew (`jaxguard route train`)",
    thresholds="routing",
    command="jaxguard route calibrate",
)


def service_of(metadata: Mapping[str, Any]) -> str:
    """What selects a tau: the service of a trajectory or session, else its domain; ``""`` where neither is known.

    Raises:
        RouterError: one of them is not text.
    """
    for name in ("service", "domain"):
        if value := _text(metadata, name):
            return value
    return ""


def _text(metadata: Mapping[str, Any], name: str) -> str:
    value = metadata.get(name)
    if not (value is None or isinstance(value, str)):
        raise RouterError(f"metadata {name}: got {type(value).__name__}, expected text or None")
    return value or ""


@dataclass
class Router:
    """A trained world model with a route head, the encoder that it reads and the thresholds it works at.

    Attributes:
        config: The experiment that made it.
        params: ``{"world": ..., "head": ...}``.
        encoder: The frozen encoder.
        routing: Thresholds; ``None`` before they were chosen (then there are logits but no routes).
        provenance: Where weights and data came from; JSON-like.
    """

    config: RouteConfig
    params: Params
    encoder: Encoder
    routing: Routing | None = None
    provenance: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.encoder.dim != self.config.model.embed_dim:
            raise RouterError(
                f"model.embed_dim is {self.config.model.embed_dim}, but the encoder {self.encoder.fingerprint} "
                f"makes {self.encoder.dim} values per text"
            )
        seen = self.config.route
        self.source = model_hash(
            self.params,
            self.config.model,
            self.config.data.thought,
            [seen.memory, seen.grounding, seen.recurrence, GROUNDING_VERSION],
            self.encoder.fingerprint.short,
        )
        """Fingerprint of everything that moves a logit; what thresholds are bound to."""
        self._scorer: RouteScorer | None = None
        if self.routing is not None:
            self.routing.check(self.source)

    @property
    def scorer(self) -> RouteScorer:
        """The compiled scorer, made when first needed."""
        if self._scorer is None:
            self._scorer = RouteScorer(self.config.model, self.params, self.config.route.recurrence)
        return self._scorer

    def routed(self, routing: Routing) -> Router:
        """The same router at these thresholds; refused where they were chosen on other logits."""
        router = dataclasses.replace(self, routing=routing)
        router._scorer = self._scorer
        return router

    def logits(
        self, trajectories: Iterable[Trajectory], store: FeatureStore | None = None
    ) -> Iterator[tuple[int, Trajectory, np.ndarray]]:
        """Logits ``[T, 17]`` of each trajectory (routes, then triggers), with its position; in order of length.

        Args:
            trajectories: Read lazily, some hundred at a time; those without steps give ``[0, 17]``.
            store: Holds a vector for every text; without one, texts are encoded on the spot.

        Raises:
            JaxguardError: a text is not in ``store``, or ``store`` belongs to another encoder.
        """
        if store is not None and store.fingerprint != self.encoder.fingerprint:
            raise RouterError(
                f"feature store {store.path}: made by another encoder than this router's "
                f"({store.fingerprint.differences(self.encoder.fingerprint)})"
            )
        vectors = TextVectors(self.encoder) if store is None else store
        held: list[tuple[int, Trajectory]] = []
        for item in enumerate(trajectories):
            held.append(item)
            if len(held) == _AHEAD:
                yield from self._scored(held, vectors)
                held = []
        yield from self._scored(held, vectors)

    def _scored(
        self, held: Sequence[tuple[int, Trajectory]], vectors: FeatureStore | TextVectors
    ) -> Iterator[tuple[int, Trajectory, np.ndarray]]:
        by_bucket: dict[int, list[tuple[int, Trajectory]]] = {}
        for position, trajectory in held:
            if trajectory.steps:
                by_bucket.setdefault(bucket(len(trajectory)), []).append((position, trajectory))
            else:
                yield position, trajectory, np.empty((0, OUTPUTS), np.float32)
        for size, members in sorted(by_bucket.items()):
            rows_at_once = max(min(_STEPS // size, _ROWS), 1)
            for first in range(0, len(members), rows_at_once):
                part = members[first : first + rows_at_once]
                texts = RouteTextRows(self.config.route, thought=self.config.data.thought)
                rows: list[RouteRows] = [texts.rows(trajectory, len(trajectory)) for _, trajectory in part]
                try:
                    table = vectors.gather(vectors.rows(list(texts.texts)))
                except MissingTexts as error:
                    raise MissingTexts(f"{error}, with --router also what a router reads beside") from error
                found = self.scorer.batch(pad_rows(table, rows, rows_at_once))
                for (position, trajectory), own in zip(part, found, strict=False):
                    yield position, trajectory, own[: len(trajectory)]

    def session(
        self, instruction: str, metadata: Mapping[str, Any] | None = None, mode: Mode = Mode.FAIL_CLOSED
    ) -> RouteSession:
        """A live session for one task.

        Args:
            instruction: The task given to the agent.
            metadata: ``memory`` is what is known of the user; ``service`` (or else ``domain``) selects its tau where
                it has one.
            mode: Enforce routes, or only observe.

        Raises:
            RouterError: an argument is not of its type, or the router has no thresholds.
        """
        return RouteSession(self, instruction, {} if metadata is None else metadata, mode)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the bundle folder: ``router.json``, ``weights.safetensors``, ``routing.json``; whole or not at all."""
        description = {
            "config": to_dict(self.config),
            "encoder": self.encoder.fingerprint.to_dict(),
            "weights": self.source,
            "provenance": self.provenance,
        }
        thresholds = None if self.routing is None else self.routing.to_json()
        BUNDLE.write(Path(path), description, flatten(self.params), thresholds)

    @classmethod
    def load(cls, path: str | os.PathLike[str], encoder: Encoder | None = None) -> Router:
        """Reads a bundle.

        Args:
            path: Folder that :meth:`save` wrote.
            encoder: Used instead of making the one that the bundle names; must have its fingerprint.

        Raises:
            RouterError: no bundle there, another version, damaged, or another encoder.
        """
        folder = Path(path)
        with BUNDLE.naming(folder):
            description = BUNDLE.read(folder)
            config = from_dict(description["config"], RouteConfig)
            expected = EncoderFingerprint.from_dict(description["encoder"])
            encoder = load_encoder(config.encoder) if encoder is None else encoder
            if encoder.fingerprint != expected:
                raise RouterError(
                    f"was made for another encoder than the one at hand ({expected.differences(encoder.fingerprint)})"
                )
            params = BUNDLE.read_weights(folder, lambda arrays: _parts(arrays, config))
            router = cls(config, params, encoder, provenance=description["provenance"])
            if router.source != description["weights"]:
                raise RouterError(
                    f"{WEIGHTS} and {BUNDLE.file} do not belong together (or what is read of trace and memory has "
                    f"changed since; here it is version {GROUNDING_VERSION})"
                )
            routing = BUNDLE.read_thresholds(folder, description["routing"], Routing.from_json)
            return router if routing is None else router.routed(routing)


def _parts(arrays: Mapping[str, np.ndarray], config: RouteConfig) -> Params:
    """The world model's and the head's parameters of one file."""
    kinds = {"world": {}, "head": {"kind": RouteHead}}
    found: dict[str, dict[str, np.ndarray]] = {name: {} for name in kinds}
    for name, array in arrays.items():
        part, _, rest = name.partition(".")
        if part not in found:
            raise ParamsError(f"weights: got {name!r}, expected names that start with {' or '.join(found)}")
        found[part][rest] = array
    return {name: unflatten(found[name], config.model, **options) for name, options in kinds.items()}


class RouteSession(ScoringSession[RouteVerdict, tuple[RouteState, Step]]):
    """Live routes; see :class:`~jaxguard.sessions.LiveSession`. A call that cannot be scored is ASK.

    So is one that the logits would execute but whose arguments could not be parsed: how its tool will read them is not
    known. Evaluations, which sweep tau over logits, do not have that rule.
    """

    misuse = RouterError

    def __init__(self, router: Router, instruction: str, metadata: Mapping[str, Any], mode: Mode):
        if router.routing is None:
            raise RouterError("router: has no thresholds; run `jaxguard route calibrate` first")
        if not isinstance(metadata, Mapping):
            raise RouterError(f"metadata: got {type(metadata).__name__}, expected a mapping or None")
        super().__init__(mode, thought=router.config.data.thought)
        self._router = router
        self._require_text("instruction", instruction)
        self._tau = router.routing.tau_for(service_of(metadata))
        self._instruction = well_formed(instruction)
        self._seen = Grounding(_text(metadata, "memory"))
        self._vectors = LiveVectors(router.encoder)
        self._earlier: list[Step] = []
        self._state: RouteState | None = None

    def _score(self, proposal: Proposal) -> tuple[RouteVerdict, tuple[RouteState, Step]]:
        scorer, seen = self._router.scorer, self._router.config.route
        evidence, note = self._seen.read(proposal.step)
        texts = [
            proposal.observation,
            proposal.action,
            evidence if seen.grounding else "",
            note if seen.grounding and seen.memory else "",
        ]
        start = self._state
        if start is None:
            memory = self._seen.memory if seen.memory else ""
            start = scorer.start(*self._vectors([self._instruction, memory], live=False))
        state, logits = scorer.step(start, *self._vectors(texts))
        if not np.isfinite(logits).all():
            raise RouterError(f"route head: logits {logits[:ROUTES].tolist()}, expected finite ones")
        self._state = start  # not before its step was scored: what failed must not stay
        route, share = route_step(logits[:ROUTES].tolist(), self._tau)
        unread = route is Route.EXECUTE and proposal.step.raw_arguments is not None
        route = Route.ASK if unread else route
        spread = np.exp(logits[:ROUTES].astype(np.float64) - logits[:ROUTES].max())
        execute, ask, refuse = (spread / spread.sum()).tolist()
        trigger = ""
        if route is not Route.EXECUTE and not unread:
            fitting = [i for i, letter in enumerate(LETTERS) if TRIGGERS[letter] is route]
            trigger = LETTERS[max(fitting, key=lambda i: float(logits[ROUTES + i]))]
        reason, question = explain(
            route,
            trigger,
            proposal.step,
            evidence=evidence,
            note=note,
            missing=missing_arguments(proposal.step, self._earlier),
        )
        verdict = RouteVerdict(
            self._steps,
            route,
            (execute, ask, refuse),
            share,
            self._tau,
            trigger,
            reason,
            question,
            self._mode is Mode.OBSERVE and route is not Route.EXECUTE,
        )
        return verdict, (state, proposal.step)

    def _adopt(self, state: tuple[RouteState, Step]) -> None:
        self._state, step = state
        self._seen.add(step.observation)
        self._earlier.append(step)

    def _hold(self, error: str) -> RouteVerdict:
        nothing = (math.nan,) * 3
        observed = self._mode is Mode.OBSERVE
        return RouteVerdict(
            self._steps, Route.ASK, nothing, math.nan, self._tau, reason=f"Could not be scored: {error}",
            question="This call could not be checked. May it run?", observed_only=observed, error=error,
        )  # fmt: skip


class JointSession(LiveSession[JointVerdict, tuple[Any, Any]]):
    """Guard and router on the same calls, one verdict; the more severe of both counts.

    Args:
        guard: A calibrated guard.
        router: A router with thresholds.
        instruction: The task given to the agent.
        metadata: As for :meth:`Guard.session` and :meth:`Router.session`.
        mode: Enforce, or only observe.

    Where one half cannot score a call, that half holds and the other says what it found; the call is not committed
    then, so that both always stand at the same step.

    Raises:
        GuardError: an argument is not of its type, a half has no thresholds, or one reads thoughts and one does not.
    """

    misuse = RouterError

    def __init__(
        self,
        guard: Guard,
        router: Router,
        instruction: str,
        metadata: Mapping[str, Any] | None = None,
        mode: Mode = Mode.FAIL_CLOSED,
    ):
        if guard.config.data.thought != router.config.data.thought:
            raise RouterError("guard and router: one reads thoughts and one does not, expected the same of both")
        super().__init__(mode, thought=guard.config.data.thought)
        self._of_guard = guard.session(instruction, metadata, mode)
        self._of_router = router.session(instruction, metadata, mode)
        if guard.encoder.fingerprint == router.encoder.fingerprint:
            self._of_router._vectors = self._of_guard._vectors

    def _checked(
        self, digest: str, step: Step, observation: str, action: str
    ) -> Checked[JointVerdict, tuple[Any, Any]]:
        self._of_guard._steps = self._of_router._steps = self._steps
        guard = self._of_guard._checked(digest, step, observation, action)
        router = self._of_router._checked(digest, step, observation, action)
        scored = guard.state is not None and router.state is not None
        state = (guard.state, router.state) if scored else None
        return Checked(digest, JointVerdict(guard.verdict, router.verdict), state)

    def _adopt(self, state: tuple[Any, Any]) -> None:
        self._of_guard._adopt(state[0])
        self._of_router._adopt(state[1])

    def _hold(self, error: str) -> JointVerdict:
        self._of_guard._steps = self._of_router._steps = self._steps
        return JointVerdict(self._of_guard._hold(error), self._of_router._hold(error))
