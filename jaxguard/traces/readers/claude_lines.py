"""Lines of a Claude Code session to chat messages: answers put together, the task told from what stands beside it."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from jaxguard.traces.readers.calls import visible_text
from jaxguard.traces.registry import Record, RecordError

_ATTACHED = ("queued_command", "file", "directory", "edited_text_file", "selected_lines_in_ide", "nested_memory")
_SHOWN_ATTACHMENTS = (*_ATTACHED, "mcp_resource", "hook_additional_context", "hook_blocking_error")
# What the user did beside the conversation: commands of the program itself and of the shell, with their output.
_LOCAL = re.compile(r"\s*<(?:command-(?:name|message|args|contents)|local-command-\w+|bash-\w+)>")
_CAVEAT = re.compile(r"\s*(?:<local-command-caveat>|Caveat: The messages below)")


def text_of(value: object) -> str:
    """A text, ``""`` for everything else."""
    return value if isinstance(value, str) else ""


def is_prompt(line: Mapping[str, Any]) -> bool:
    """Are these words that the user wrote to the agent?"""
    message = line.get("message")
    if line.get("type") != "user" or not isinstance(message, dict):
        return False
    if line.get("isMeta") or line.get("isCompactSummary"):
        return False
    content = message.get("content")
    if isinstance(content, list) and any(isinstance(p, dict) and p.get("type") == "tool_result" for p in content):
        return False
    text = visible_text(content)
    return bool(text.strip()) and not _LOCAL.match(text)


def is_shown(line: Mapping[str, Any]) -> bool:
    """Is this an attachment whose text the agent got?"""
    held = line.get("attachment")
    return line.get("type") == "attachment" and isinstance(held, dict) and held.get("type") in _SHOWN_ATTACHMENTS


def calls_in(value: object) -> Iterator[tuple[str, str, object]]:
    """Id, tool and input of every call, wherever it stands."""
    waiting = [value]
    while waiting:
        node = waiting.pop()
        if isinstance(node, dict):
            if node.get("type") == "tool_use" and isinstance(node.get("name"), str):
                yield text_of(node.get("id")), node["name"], node.get("input")
            waiting += node.values()
        elif isinstance(node, list):
            waiting += node


def chat_messages(lines: Sequence[Record], task: str) -> list[dict[str, Any]]:
    """The messages, the task before what was said to the agent beside it.

    Args:
        lines: Those of one trajectory.
        task: What a sub-agent was called with, for where no line says it; ``""`` where that is not known.

    Raises:
        RecordError: A line has not the shape of one.
    """
    return [part for message in _ordered(list(_each_message(lines)), task) for part in _words_first(message)]


def _words_first(message: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """A message in several where words come after a call: they are no part of what was said with it."""
    blocks = message.get("content")
    if message["role"] != "assistant" or not isinstance(blocks, list):
        yield message
        return
    start, called = 0, False
    for index, block in enumerate(blocks):
        is_call = isinstance(block, dict) and block.get("type") == "tool_use"
        if called and not is_call:
            yield {**message, "content": blocks[start:index]}
            start = index
        called = is_call
    yield {**message, "content": blocks[start:]}


def _each_message(lines: Sequence[Record]) -> Iterator[tuple[dict[str, Any], bool]]:
    """Chat messages, each with whether it is the user's own words."""
    answer: _Answer | None = None
    answers: dict[object, _Answer] = {}
    command = ""  # of the program, expanded by the next line
    expands = ""
    for line in lines:
        if line["type"] == "attachment":
            held = line["attachment"]
            text = visible_text(next((held[name] for name in ("prompt", "content", "snippet") if held.get(name)), None))
            yield {"role": "user" if held["type"] == "queued_command" else "system", "content": text}, False
            continue
        message = line.get("message")
        if not isinstance(message, dict) or message.get("role") != line["type"]:
            raise RecordError(
                f"line {text_of(line.get('uuid'))}: message: got {message!r:.60}, expected one of {line['type']}"
            )
        if line["type"] == "assistant":
            given = message.get("id")
            key = (given, text_of(line.get("requestId"))) if isinstance(given, str) and given else None
            known = answers.get(key) if key else None
            if known is None or known is not answer:
                answer = _Answer(message, known.calls if known else {})
                answers[key] = answer
                yield answer.message, False
            answer.add(message.get("content"))
            continue
        text = visible_text(message.get("content"))
        if line.get("isMeta") and command and line.get("parentUuid") == expands and not _CAVEAT.match(text):
            yield {"role": "user", "content": f"{command}\n{text}"}, True
            command = ""
            continue
        if _LOCAL.match(text) and "<command-name>" in text:
            named = f"{_between(text, 'command-name')} {_between(text, 'command-args')}"
            command, expands = named.strip(), text_of(line.get("uuid"))
        own_words = is_prompt(line)
        quiet = bool(line.get("isMeta") or line.get("isCompactSummary")) and isinstance(message.get("content"), str)
        yield {**message, "role": "system" if quiet else "user"}, own_words


def _between(text: str, tag: str) -> str:
    return text.partition(f"<{tag}>")[2].partition(f"</{tag}>")[0].strip()


class _Answer:
    """One message of the model, put together from its lines, which may repeat what earlier ones held."""

    def __init__(self, message: Mapping[str, Any], calls: dict[str, Any]) -> None:
        self.blocks: list[Any] = []
        self.message = {**message, "content": self.blocks}
        self.calls = calls  # those that an earlier, interrupted copy of the message holds come along
        self._texts: dict[str, int] = {}

    def add(self, content: object) -> None:
        given = [{"type": "text", "text": content}] if isinstance(content, str) else content
        if not isinstance(given, list):
            raise RecordError(f"message.content: got {content!r:.60}, expected a text or a list")
        for block in given:
            kind = block.get("type") if isinstance(block, dict) else None
            if kind == "tool_use" and isinstance(block.get("id"), str) and block["id"]:
                held = self.calls.get(block["id"])
                if held is not None:
                    if held.get("name") != block.get("name") or not _grew(held.get("input"), block.get("input")):
                        raise RecordError(f"two different calls have the id {block['id']!r}, expected copies of one")
                    held["input"] = block.get("input")
                    continue
                self.calls[block["id"]] = block = dict(block)
            elif kind in ("text", "thinking") and isinstance(block.get(kind), str):
                last = self._texts.get(kind)
                if last is not None and block[kind].startswith(self.blocks[last][kind]):
                    self.blocks[last] = block
                    continue
                self._texts[kind] = len(self.blocks)
            self.blocks.append(block)


def _grew(before: object, after: object) -> bool:
    """Is the later copy of a call's input the same, or what streaming made of it?"""
    if before == after or not before:
        return True
    return (
        isinstance(before, dict)
        and isinstance(after, dict)
        and all(
            name in after and (value == after[name] or _starts(value, after[name])) for name, value in before.items()
        )
    )


def _starts(value: object, longer: object) -> bool:
    return isinstance(value, str) and isinstance(longer, str) and longer.startswith(value)


def _ordered(messages: Sequence[tuple[dict[str, Any], bool]], task: str) -> list[dict[str, Any]]:
    """The user's first own words before all that was said to the agent beside them: they are the task."""
    for index, (message, own_words) in enumerate(messages):
        if own_words:
            before = [earlier for earlier, _ in messages[:index]]
            return [message, *before, *(later for later, _ in messages[index + 1 :])]
        if any(True for _ in calls_in(message)):
            break
    given = [{"role": "user", "content": task}] if task else []
    return [*given, *(message for message, _ in messages)]
