"""Chat messages with OpenAI's ``tool_calls`` or Anthropic's ``tool_use`` parts.

The record is a list of messages, or an object that holds one.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from jaxguard.traces.readers.calls import read_conversation, refuse_calls_beside
from jaxguard.traces.readers.response_items import is_item
from jaxguard.traces.registry import Context, Reader, Record, RecordError
from jaxguard.types import Trajectory

_LIST_FIELDS = ("messages", "traj", "conversations", "output")
_ID_FIELDS = ("id", "trajectory_id", "conversation_id", "run_id", "session_id", "uuid", "task_id")
_ROLES = {"system", "developer", "user", "assistant", "tool", "function"}
# Objects with a list of messages that mean more than a chat: AgentDojo runs, ASB traces (calls stand in the text),
# Langfuse traces.
_OTHER_FORMATS = ({"user_task_id", "suite_name"}, {"agent_name", "attack_tool"}, {"observations", "timestamp"})
_MAX_METADATA_CHARS = 500


def _message_field(record: Record) -> str | None:
    for name in _LIST_FIELDS:
        messages = record.get(name)
        if isinstance(messages, list) and messages:
            first = messages[0]
            role = first.get("role") if isinstance(first, dict) else None
            if isinstance(role, str) and role in _ROLES:
                return name
    return None


def _matches(record: Record) -> bool:
    name = _message_field(record)
    if name is None or any(keys <= record.keys() for keys in _OTHER_FORMATS):
        return False
    return record.get("object") != "response" and not any(is_item(message) for message in record[name])


def _read(record: Record, context: Context) -> Iterable[Trajectory]:
    name = _message_field(record)
    if name is None:
        raise RecordError(f"no chat messages in any of the fields {', '.join(_LIST_FIELDS)}")
    refuse_calls_beside(record, name)
    conversation = read_conversation(record[name], name)
    metadata = _metadata(record, conversation.instruction)
    unsafe = _judged_unsafe(record)
    if unsafe is not None:
        metadata["label_source"] = "judge model"
    task = record.get("task_id")
    yield conversation.trajectory(
        metadata,
        id=_trajectory_id(record, context),
        unsafe=unsafe,
        # A judge's verdict names no step, and its "safe" is no gold label to supervise every step with.
        timing=False,
        group=f"{context.stem}:{task}" if isinstance(task, str | int) else "",
        source="openai_chat",
    )


def _judged_unsafe(record: Record) -> bool | None:
    """Agent-SafetyBench's ``pred_label`` (1 unsafe, 0 safe), the only label this layout is known to carry."""
    label = record.get("pred_label")
    if label in (0, 1) and "pred_answer" in record:
        return bool(label)
    return None


def _trajectory_id(record: Record, context: Context) -> str:
    for name in _ID_FIELDS:
        value = record.get(name)
        if isinstance(value, str | int) and not isinstance(value, bool) and value != "":
            trial = record.get("trial")
            suffix = f":{trial}" if isinstance(trial, int) else ""
            return f"{context.stem}:{value}{suffix}"
    return f"{context.stem}:{context.position}"


def _metadata(record: Record, instruction: str) -> dict[str, Any]:
    """The record's short scalar fields: reward, trial, model and the like, kept for reports."""
    return {
        key: value
        for key, value in record.items()
        if isinstance(value, str | int | float) and value != instruction and len(str(value)) <= _MAX_METADATA_CHARS
    }


READER = Reader(
    name="openai_chat",
    description="OpenAI (tool_calls) and Anthropic (tool_use) messages, bare or under messages, traj, ..., output",
    matches=_matches,
    read=_read,
)
