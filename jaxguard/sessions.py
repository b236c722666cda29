"""What live sessions have in common: check before a call, commit when it goes ahead, idempotent by call id."""

from __future__ import annotations

import dataclasses
import hashlib
import logging
import threading
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

from jaxguard.decision.policy import Mode
from jaxguard.features.characters import well_formed
from jaxguard.features.texts import action_text
from jaxguard.traces.readers.calls import parse_arguments
from jaxguard.types import JaxguardError, Step

logger = logging.getLogger(__name__)


class Answer(Protocol):
    """What a check answers."""

    @property
    def error(self) -> str: ...


V = TypeVar("V", bound=Answer)
S = TypeVar("S")


@dataclass(frozen=True)
class Proposal:
    """A proposed call as its texts, and the step that it is if it runs."""

    step: Step
    observation: str
    action: str


@dataclass(frozen=True)
class Checked(Generic[V, S]):
    """A check that was made: what was asked, what was answered, and the state a commit moves to (None: it failed)."""

    digest: str
    verdict: V
    state: S | None


class LiveSession(ABC, Generic[V, S]):
    """Verdicts for one running agent: ``check`` before a call, ``commit`` when it goes ahead.

    Checking changes nothing, however often it is done; only a commit moves the state. Both are idempotent
    by call id, because agent hosts retry their hooks. Methods may be called from several threads.

    A failure while scoring yields a verdict that holds, with ``error``, never an exception that a host could take
    for consent; a misuse (an unknown call id, another call under a committed id) raises ``misuse``.
    Of several calls checked under one id, the last is the one that a commit stands for.
    """

    misuse: type[JaxguardError] = JaxguardError

    def __init__(self, mode: Mode, *, thought: bool = False):
        if mode not in list(Mode):
            raise self.misuse(f"mode: got {mode!r:.80}, expected one of {', '.join(Mode)}")
        self._mode = Mode(mode)
        self._thought = thought
        self._steps = 0
        # By call id; where the host gives none, by the number of the step, which no id equals.
        self._pending: dict[str | int, Checked[V, S]] = {}
        self._committed: dict[str | int, Checked[V, S]] = {}
        self._lock = threading.Lock()

    @abstractmethod
    def _checked(self, digest: str, step: Step, observation: str, action: str) -> Checked[V, S]:
        """What is said of a call that could be read; raises nothing."""

    @abstractmethod
    def _hold(self, error: str) -> V:
        """The verdict on a call that could not be scored."""

    @abstractmethod
    def _adopt(self, state: S) -> None:
        """Moves on to the state of a call that runs."""

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
    ) -> V:
        """The verdict on a proposed call; nothing changes.

        Args:
            observation: What became visible since the last committed call was proposed; ``""`` if nothing,
                and for every further call of one turn the same text as for its first.
            tool: Name of the tool.
            arguments: The call's JSON object, or its text, which is parsed as the readers of traces do.
            call_id: The host's id of this call; defaults to the position of the step.
            thought: Read only by guards that were trained with thoughts.

        Raises:
            JaxguardError: ``call_id`` is committed with another observation, tool or arguments, or is not text; or
                observation, tool or thought is not text, or arguments are neither an object nor text.
        """
        for name, value in (("observation", observation), ("tool", tool), ("thought", thought)):
            self._require_text(name, value)
        if not (arguments is None or isinstance(arguments, str | Mapping)):
            raise self.misuse(f"arguments: got {type(arguments).__name__}, expected a mapping, text or None")
        self._require_call_id(call_id)
        texts, problem, step = [well_formed(observation)], "", Step(tool, None, call_id or "")
        try:
            parsed, raw = parse_arguments(dict(arguments) if isinstance(arguments, Mapping) else arguments)
            step = Step(tool, parsed, call_id or "", observation, raw_arguments=raw, thought=thought)
            texts.append(action_text(step, thought=self._thought))
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
                    raise self.misuse(f"call id {key!r}: was committed with another call; ids must not be reused")
                return known.verdict
            pending = self._pending.get(key)
            # A check that failed is made anew: what failed may have recovered.
            if pending is None or pending.digest != digest or pending.state is None:
                pending = Checked(digest, self._hold(problem), None) if problem else self._checked(digest, step, *texts)
                self._pending[key] = pending
            return pending.verdict

    def commit(self, call_id: str | None = None) -> None:
        """Moves on: the checked call is going to run. Committing the same id again changes nothing.

        Args:
            call_id: As given to :meth:`check`; may be left out where the checks left it out (then every
                commit needs a check of its own).

        Raises:
            JaxguardError: the call was not checked since the last commit, or its check failed to score (an
                observing session logs that and goes on); or ``call_id`` is not text.
        """
        self._require_call_id(call_id)
        with self._lock:
            key = self._steps if call_id is None else call_id
            if key in self._committed:
                return
            checked = self._pending.get(key)
            if checked is None:
                raise self.misuse(f"call id {key!r}: was not checked since the last commit; check it first")
            if checked.state is not None:
                self._adopt(checked.state)
            elif self._mode is Mode.FAIL_CLOSED:
                raise self.misuse(f"call id {key!r}: could not be scored ({checked.verdict.error}); check it again")
            else:  # the host runs the call whatever the guard says: go on without having seen it
                logger.warning(
                    "call id %r ran unscored (%s): later verdicts do not know of it", key, checked.verdict.error
                )
            self._steps += 1
            self._committed[key] = dataclasses.replace(checked, state=None)
            self._pending.clear()

    def _require_text(self, name: str, value: object) -> None:
        if not isinstance(value, str):
            raise self.misuse(f"{name}: got {type(value).__name__}, expected text")

    def _require_call_id(self, value: object) -> None:
        """Other kinds could equal the number of a step, which stands for a missing id."""
        if not (value is None or isinstance(value, str)):
            raise self.misuse(f"call_id: got {type(value).__name__}, expected text or None")


class ScoringSession(LiveSession[V, S]):
    """A session that scores calls itself."""

    @abstractmethod
    def _score(self, proposal: Proposal) -> tuple[V, S]:
        """The verdict on a call that could be read, and the state if it runs; whatever it raises holds the call."""

    def _checked(self, digest: str, step: Step, observation: str, action: str) -> Checked[V, S]:
        try:
            verdict, state = self._score(Proposal(step, observation, action))
        except Exception as error:  # fail closed: whatever went wrong, the call must not run unseen
            logger.exception("scoring a proposed call to %r failed", step.tool)
            return Checked(digest, self._hold(f"{type(error).__name__}: {error}"), None)
        return Checked(digest, verdict, state)
