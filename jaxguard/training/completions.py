"""What a router is taught to answer: think block, decision token and JSON payload of every reviewed step.

Reasons are read from a trajectory's metadata where they are there, beside ``reviews``::

    "rationales": [{"step": 4, "think": "...", "reason": "...", "question": "..."}]

(``think`` and ``question`` may be left out). Elsewhere they are built from the review's trigger by a fixed sentence:
enough for the form of an answer, and for the decision, which is what the threshold needs.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from jaxguard.features.decision_prompt import PromptEncoder, PromptError
from jaxguard.traces.snapshots import TRIGGERS, Review, SnapshotError, reviews_of, snapshot
from jaxguard.types import Route, Trajectory

IGNORED = -100
"""Label of a token that carries no loss."""

REASONS: Mapping[str, str] = {
    "a": "It only looks something up and changes nothing.",
    "b": "It changes one thing, and what follows from that stays small.",
    "c": "The calls before it have already settled which thing is meant.",
    "d": "It renames something others may point to, which can be put back.",
    "e": "A value that safety depends on is left out, and nothing shown so far gives it.",
    "f": "Nothing shown so far proves that the person asking may order this.",
    "g": "It cannot be taken back and reaches far.",
    "h": "More than one thing fits what the call names.",
    "i": "It takes a state for granted that nobody has looked at.",
    "j": "It would hand internal data to someone who must not have them.",
    "k": "It would remove the record of what was done.",
    "l": "It would hand over access that belongs to someone else.",
    "m": "It is aimed at hurting a particular person.",
    "n": "It would keep others from using the service.",
}
"""A sentence for each trigger (Safety Sentry, table 4)."""

_QUESTIONS: Mapping[str, str] = {
    "e": "Which value should {tool} use for what is missing?",
    "f": "Who has approved that {tool} is called?",
    "g": "Should {tool} really run now?",
    "h": "Which of the possible targets of {tool} do you mean?",
    "i": "Should the present state be checked before {tool} runs?",
}
_PLAIN_REASONS = {
    Route.EXECUTE: "Nothing shown so far speaks against it.",
    Route.ASK: "The user has to settle this.",
    Route.REFUSE: "It must not be done, whoever asks.",
}
_MOVED = {
    Route.EXECUTE: "What is known of the user allows it.",
    Route.ASK: "What is known of the user calls for a confirmation.",
    Route.REFUSE: "What is known of the user cannot make it acceptable.",
}


@dataclass(frozen=True, slots=True)
class Rationale:
    """Why a step is routed as it is; ``question`` is ``""`` unless the route is ASK."""

    think: str
    reason: str
    question: str

    def payload(self) -> str:
        """The JSON object behind the decision token."""
        values = {"reason": self.reason} | ({"question": self.question} if self.question else {})
        return json.dumps(values, ensure_ascii=False)


def rationales_of(trajectory: Trajectory) -> dict[int, Rationale]:
    """A rationale for each reviewed step, by its index.

    Raises:
        SnapshotError: ``reviews`` or ``rationales`` in the metadata is not what the module describes, or a rationale
            belongs to no reviewed step.
    """
    reviews = {review.step: review for review in reviews_of(trajectory)}
    found = {step: _built(review, trajectory.steps[step].tool) for step, review in reviews.items()}
    listed = trajectory.metadata.get("rationales")
    where = f"trajectory {trajectory.id!r}: rationales"
    if listed is None:
        return found
    if not isinstance(listed, list | tuple):
        raise SnapshotError(f"{where}: got {type(listed).__name__}, expected a list")
    for at, value in enumerate(listed):
        if not isinstance(value, Mapping) or not {"step", "reason"} <= value.keys() <= {
            "step",
            "think",
            "reason",
            "question",
        }:
            raise SnapshotError(f"{where} {at}: got {value!r:.80}, expected step, reason, perhaps think and question")
        step = value["step"]
        if type(step) is not int or step not in reviews:
            raise SnapshotError(f"{where} {at} step: got {step!r:.80}, expected a reviewed step")
        for name in ("think", "reason", "question"):
            if not isinstance(value.get(name, ""), str):
                raise SnapshotError(f"{where} {at} {name}: got {type(value[name]).__name__}, expected a text")
        built = found[step]
        question = (value.get("question") or built.question) if reviews[step].route is Route.ASK else ""
        found[step] = Rationale(value.get("think") or value["reason"], value["reason"], question)
    return found


def _built(review: Review, tool: str) -> Rationale:
    reason = REASONS.get(review.trigger, _PLAIN_REASONS[review.route])
    if review.trigger and TRIGGERS[review.trigger] is not review.route:
        reason = f"{reason} {_MOVED[review.route]}"
    question = _QUESTIONS.get(review.trigger, "Should {tool} run?") if review.route is Route.ASK else ""
    return Rationale(f"The proposed call is {tool}. {reason}", reason, question.replace("{tool}", tool))


def completion_records(
    trajectories: Iterable[Trajectory], encode: PromptEncoder, end: int, max_tokens: int
) -> tuple[list[dict[str, list[int]]], list[tuple[str, str]]]:
    """Token ids and labels of every reviewed step (Safety Sentry, section 3.3 and appendix C).

    The pieces are tokenised one by one, exactly as :class:`jaxguard.features.decision_logits.DecisionReader` puts
    them together, and the labels of the prompt are :data:`IGNORED`: the loss is on the answer alone.

    Args:
        trajectories: With ``reviews`` in their metadata; those without give no record.
        encode: Prompt, tokens and style.
        end: Id of the token that ends an answer.
        max_tokens: Longest record; a longer one is left out, never cut.

    Returns:
        Records of ``input_ids`` and ``labels``; and ``(trajectory:step, reason)`` of those that were left out.

    Raises:
        SnapshotError: A trajectory's metadata are not what they should be.
    """
    records: list[dict[str, list[int]]] = []
    left_out: list[tuple[str, str]] = []
    for trajectory in trajectories:
        rationales = rationales_of(trajectory)
        for review in reviews_of(trajectory):
            name, shown = f"{trajectory.id}:{review.step}", snapshot(trajectory, review.step)
            try:
                prompt = encode(shown.to_json())
                answer = [*_answer(encode, review.route, rationales[review.step]), end]
            except (PromptError, SnapshotError) as error:  # the latter: arguments that JSON cannot hold
                left_out.append((name, str(error)))
                continue
            if (length := len(prompt) + len(answer)) > max_tokens:
                left_out.append((name, f"has {length} tokens, expected at most {max_tokens}"))
                continue
            records.append({"input_ids": prompt + answer, "labels": [IGNORED] * len(prompt) + answer})
    return records, left_out


def _answer(encode: PromptEncoder, route: Route, rationale: Rationale) -> list[int]:
    thought: list[int] = []
    if encode.close:
        thought = [*encode.plain(rationale.think), *encode.encode("\n"), *encode.close]
    return [*thought, encode.decisions[route], *encode.plain(rationale.payload())]


def digest_of(records: Iterable[Mapping[str, Any]]) -> str:
    """Hash of records, in order."""
    digest = hashlib.sha256()
    for record in records:
        digest.update(json.dumps([record["input_ids"], record["labels"]]).encode())
    return digest.hexdigest()[:16]
