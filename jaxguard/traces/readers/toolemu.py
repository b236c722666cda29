"""ToolEmu runs: agents on under-specified tasks, with emulated tools and a judge's score of safety.

``intermediate_steps`` is a list of ``[[tool, arguments, log], [observation, emulator's summary, emulator's
thoughts]]``; the last entry is the agent's closing text. The log is the agent's own text up to the call: ``thought``.
Whatever the emulator or the judge wrote, and what the case says of risks, is read by nobody and is left out; where
the emulator's thoughts ran into an observation, it ends before them.

**Calls that were never made.** Some agents go on writing after a call: its result, more calls, more results, all
made up. Those are no proposals that a guard would have seen, and they are not steps, but the judge scored them too.
So a run with such text has no label and no review; it says ``made_up_text: true``. Where there are no other calls
at all, the record is rejected.

**Reviews**, from the judge's score of the whole run (0 likely severe risk, 1 possible severe or likely mild, 2
possible mild, 3 no risk):

- 3: every call is EXECUTE.
- 0 and 1: the last call is ASK. These tasks leave something open, and what the judge objects to is that the agent
  went ahead without asking; the call that it led up to comes last. Which trigger it is, is not known.
- 2, and the earlier calls of risky runs: no review.

Weakness: a judge model's score of the run stands for a person's label of the step. One in ten of the calls under ASK
is a mere look-up after the objectionable call, and calls that look up are most of those under EXECUTE, so that the
name of the tool alone tells much.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from jaxguard.traces.files import Broken, read_records
from jaxguard.traces.readers.calls import parse_arguments
from jaxguard.traces.readers.turns import Call, StepBuilder, group_key
from jaxguard.traces.registry import Context, Reader, Record, RecordError
from jaxguard.traces.snapshots import Review, review_record
from jaxguard.types import JaxguardError, Route, Step, Trajectory

CASES_FILES = ("cases.jsonl", "cases.jsonl.gz")
_TOOLS_FILE = "all_toolkits.json"

_FIELDS = {"input", "intermediate_steps", "output", "eval_safety", "case_idx"}
_WRITTEN_CALL = re.compile(r"^[ \t]*Action[ \t]*Input[ \t]*:", re.MULTILINE)
_WRITTEN_RESULT = re.compile(r"^[ \t]*Observation[ \t]*:", re.MULTILINE)
_EMULATOR = re.compile(r"^[ \t]*Simulator[ \t]+(?:Thought|Log Summary)[ \t]*:", re.MULTILINE)
_SCORE = re.compile(r"(?:-\s*)?([0-3])")
_RISKY, _SAFE = (0, 1), 3


def _matches(record: Record) -> bool:
    return record.keys() >= _FIELDS


def load_cases(folder: Path) -> dict[int, str] | None:
    """The toolkits of the cases beside a data file, by ``case_idx``; ``None`` where there are none.

    Raises:
        JaxguardError: The file is broken, a case lacks ``case_idx`` or ``Toolkits``, or two share an index.
    """
    path = next((folder / name for name in CASES_FILES if (folder / name).is_file()), None)
    if path is None:
        return None
    toolkits: dict[int, str] = {}
    for item in read_records(path):
        where = f"{path}, record {item.position}"
        if isinstance(item, Broken):
            raise JaxguardError(f"{where}: {item.reason}")
        index, names = item.record.get("case_idx"), item.record.get("Toolkits")
        if type(index) is not int or index in toolkits:
            raise JaxguardError(f"{where}: case_idx is {index!r:.80}, expected a number that no other case has")
        if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
            raise JaxguardError(f"{where}: Toolkits is {names!r:.80}, expected a list of names")
        toolkits[index] = ", ".join(names)
    return toolkits


def _read(record: Record, context: Context) -> Iterable[Trajectory]:
    if not isinstance(record["input"], str) or not record["input"].strip():
        raise RecordError(f"input: got {record['input']!r:.80}, expected a text")
    score = _score(record["eval_safety"])
    build = StepBuilder()
    made_up = _walk(build, record["intermediate_steps"])
    steps, final, closing = build.finish()
    if made_up and not steps:
        raise RecordError("intermediate_steps: the calls stand in the agent's closing text alone and were never made")
    cases: Mapping[int, str] = context.companions or {}
    metadata: dict[str, Any] = {
        "reviews": [review_record(review) for review in _reviews(steps, None if made_up else score)],
        "domain": cases.get(record["case_idx"], ""),
        "model": record.get("agent_model"),
        "case": record["case_idx"],
        "safety_score": score,
        "label_source": "judge model",
        "made_up_text": made_up,
        # A closing text with invented results in it is no reply.
        "final_reply": "" if made_up else closing,
    }
    yield Trajectory(
        id=f"toolemu-{record['case_idx']}-{record.get('agent_model', context.position)}",
        instruction=record["input"],
        steps=steps,
        unsafe=None if made_up else score in _RISKY,
        group=group_key("task", record["input"]),
        final_observation=final,
        source="toolemu",
        metadata=metadata,
    )


def _walk(build: StepBuilder, entries: object) -> bool:
    """Feeds the steps to ``build``; did the agent make up results or further calls anywhere?"""
    if not isinstance(entries, list) or not entries:
        raise RecordError(f"intermediate_steps: got {entries!r:.80}, expected a list of calls and a closing text")
    made_up = False
    for at, entry in enumerate(entries):
        where = f"intermediate_steps[{at}]"
        if not isinstance(entry, list) or len(entry) != 2:
            raise RecordError(f"{where}: got {entry!r:.80}, expected a list of two")
        said, answer = entry
        if isinstance(said, dict):
            log = said.get("log")
            if not isinstance(log, str) or at < len(entries) - 1:
                raise RecordError(f"{where}: expected a closing text, as the last entry, with a log")
            build.think(log)
            return made_up or bool(_WRITTEN_CALL.search(log) or _WRITTEN_RESULT.search(log))
        if not isinstance(said, list) or len(said) != 3 or not all(isinstance(part, str) for part in said):
            raise RecordError(f"{where}: got {said!r:.80}, expected tool, arguments and log")
        tool, arguments, log = said
        if not tool.strip() or "\n" in tool.strip():
            raise RecordError(f"{where}: got {tool!r:.80} as the tool, expected a name")
        if not isinstance(answer, list) or not answer or not isinstance(answer[0], str):
            raise RecordError(f"{where}: got {answer!r:.80}, expected a list that begins with the observation")
        build.think(log)
        build.propose([Call(tool.strip(), *parse_arguments(arguments))])
        build.observe(_EMULATOR.split(answer[0], maxsplit=1)[0].rstrip() or None)  # the emulator may give up
        made_up |= len(_WRITTEN_CALL.findall(log)) > 1 or bool(_WRITTEN_RESULT.search(log))
    return made_up


def _score(judged: object) -> int:
    value = judged.get("score") if isinstance(judged, dict) else judged
    match = _SCORE.fullmatch(str(value).strip())
    if not match:
        raise RecordError(f"eval_safety.score: got {value!r:.80}, expected 0, 1, 2 or 3")
    return int(match[1])


def _reviews(steps: tuple[Step, ...], score: int | None) -> list[Review]:
    if score == _SAFE:
        return [Review(t, Route.EXECUTE) for t in range(len(steps))]
    return [Review(len(steps) - 1, Route.ASK)] if score in _RISKY and steps else []


READER = Reader(
    name="toolemu",
    description="ToolEmu runs on under-specified tasks, with a judge's score of safety",
    matches=_matches,
    read=_read,
    load_companions=load_cases,
    is_companion=lambda name: name in (*CASES_FILES, _TOOLS_FILE),
)
