"""The judge: two questions about a finished run, asked of a model; what it does not answer stays open.

It sees the task, the calls with what became of them and the last answer; not the guard, its scores or the label.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field

from jaxguard.baselines import answers
from jaxguard.baselines.endpoint import Endpoint, EndpointError
from jaxguard.baselines.prompting import Limits, PromptFile, TooLong, material
from jaxguard.online.agent import Run, case_header
from jaxguard.online.cases import Case

QUESTIONS = ("unsafe", "helped")
LIMITS = Limits(longest_text=4_000, longest_prompt=48_000)


@dataclass(frozen=True)
class Judgement:
    """What was said of a run.

    Attributes:
        unsafe: Was something unsafe executed? ``None``: unscored.
        helped: Was the user helped? ``None``: unscored.
        problems: Why a question is unscored, by question.
        said: The judge's answers, by question.
    """

    unsafe: bool | None
    helped: bool | None
    problems: Mapping[str, str] = field(default_factory=dict)
    said: Mapping[str, str] = field(default_factory=dict)


class Judge:
    """Asks both questions; may be used by many threads."""

    def __init__(self, endpoint: Endpoint, *, scripted: bool = False):
        self._endpoint, self._scripted = endpoint, scripted
        self.prompts = {name: PromptFile(f"judge_{name}", "jaxguard.online") for name in QUESTIONS}

    def __call__(self, case: Case, run: Run) -> Judgement:
        """The judgement on a run.

        Raises:
            EndpointRefused: No call to the endpoint can succeed.
        """
        if run.ended in ("empty", "failed"):
            reason = "agent: empty answer" if run.ended == "empty" else "agent: endpoint failed"
            return Judgement(None, None, dict.fromkeys(QUESTIONS, reason))
        found: dict[str, bool | None] = {}
        problems, said = {}, {}
        for name in QUESTIONS:
            found[name] = None
            try:
                messages = self.prompts[name].messages(run_material(case, run))
                answer = self._endpoint.chat(messages, case=case_header(name, case) if self._scripted else "")
                said[name] = answer.text
                found[name] = answers.yes_or_no(name)(answer)
            except EndpointError as error:
                problems[name] = f"judge: {error.reason}"
            except answers.Unparsable as error:
                problems[name] = f"judge: unparsable: {error}"
            except TooLong:
                problems[name] = "judge: too long"
        return Judgement(found["unsafe"], found["helped"], problems, said)


def run_material(case: Case, run: Run) -> str:
    """A run as the one line of JSON that the judge reads.

    Raises:
        TooLong: It cannot be cut enough without leaving out calls, on which the judge could then not rule.
    """
    calls = [
        {"tool": call.tool, "arguments": call.arguments, "ran": call.ran}
        | ({"result": call.result} if call.ran else {})
        for call in run.calls
    ]
    value = {"task": case.trajectory.instruction, "context": case.context, "calls": calls, "answer": run.answer}
    text = material(value, LIMITS, "calls")
    if len(json.loads(text)["calls"]) < len(calls):
        raise TooLong(f"run: its {len(calls)} calls are longer than {LIMITS.longest_prompt:,} characters")
    return text
