"""What kind of operation a span is, and what a tool's span says of the call that it ran."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from jaxguard.traces.readers.calls import parse_arguments
from jaxguard.traces.readers.literals import literal
from jaxguard.traces.readers.span_parts import parsed, result_text
from jaxguard.traces.readers.spans import Span

_MODEL_OPERATIONS = {"chat", "generate_content", "text_completion"}
_AGENT_OPERATIONS = {"invoke_agent", "create_agent", "invoke_workflow"}
# Named by the conventions, or by one library: Google ADK, pydantic-ai, OpenInference, Vercel, OpenLLMetry.
_GIVEN = (
    "gen_ai.tool.call.arguments", "gcp.vertex.agent.tool_call_args", "tool_arguments", "tool_call.function.arguments",
    "ai.toolCall.args",
    "input.value", "tool.parameters", "traceloop.entity.input",
)  # fmt: skip
_ANSWERED = (
    "gen_ai.tool.call.result", "gcp.vertex.agent.tool_response", "tool_response", "ai.toolCall.result", "output.value",
    "traceloop.entity.output",
)  # fmt: skip
_NAMES = ("gen_ai.tool.name", "tool.name", "tool_call.function.name", "ai.toolCall.name", "traceloop.entity.name")
_IDS = ("gen_ai.tool.call.id", "gen_ai.tool_call_id", "tool_call.id", "ai.toolCall.id")
_OF_A_TOOL = ("gen_ai.tool.name", "gcp.vertex.agent.tool_call_args", "ai.toolCall.name")
_MERGED = "(merged tools)"
"""Google ADK repeats the results of parallel calls in one more span of this tool name."""


def kind_of(span: Span) -> str:
    """``"tool"``, ``"agent"`` or ``"llm"``; ``""`` for a span that tells nothing of an agent."""
    own = span.attributes
    operation, inference, loop = (
        str(own.get(name) or "").lower()
        for name in ("gen_ai.operation.name", "openinference.span.kind", "traceloop.span.kind")
    )
    if own.get("gen_ai.tool.name") == _MERGED:
        return ""
    if "tool" in (inference, loop) or operation == "execute_tool" or own.get("mcp.method.name") == "tools/call":
        return "tool"
    if not operation and not inference and any(name in own for name in _OF_A_TOOL):
        return "tool"
    if inference == "agent" or operation in _AGENT_OPERATIONS or loop in ("agent", "workflow"):
        return "agent"
    return "llm" if inference == "llm" or operation in _MODEL_OPERATIONS or "llm.request.type" in own else ""


@dataclass
class Run:
    """A call that a tool's span shows; ``result`` is ``None`` where it shows none."""

    span: Span
    tool: str
    id: str
    arguments: Any
    result: str | None

    @property
    def key(self) -> str:
        return call_key(self.tool, self.arguments)


def call_key(tool: str, arguments: Any) -> str:
    """Equal for the same call, however its arguments are written."""
    found, raw = parse_arguments(arguments)
    if raw is not None and raw.startswith('"'):
        # Some logs encode the arguments twice.
        inner = _decoded(raw)
        found, raw = parse_arguments(inner) if isinstance(inner, str) else (found, raw)
    return json.dumps([tool, found if found is not None else raw], sort_keys=True, ensure_ascii=False)


def _decoded(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def run_of(span: Span) -> Run:
    """The call of a tool's span."""
    own = span.attributes
    tool = next((own[name] for name in _NAMES if isinstance(own.get(name), str) and own[name]), "")
    arguments = next((own[name] for name in _GIVEN if own.get(name) not in (None, "")), None)
    result = next((own[name] for name in _ANSWERED if own.get(name) is not None), None)
    for name, fields in span.events:
        # Strands logs a tool's input and output as messages.
        if name == "gen_ai.tool.message" and arguments is None:
            arguments = fields.get("content")
        elif name == "gen_ai.choice" and result is None:
            result = fields.get("message")
    given = next((own[name] for name in _IDS if own.get(name)), None)
    return Run(
        span=span,
        tool=tool or span.name.removeprefix("execute_tool ").strip() or "tool",
        id=str(given) if isinstance(given, str | int) else "",
        arguments=_arguments(arguments, own),
        result=_result(result, span),
    )


def _arguments(given: Any, own: Mapping[str, Any]) -> Any:
    value = parsed(given)
    if isinstance(value, str) and value[:1] == "{":
        read = literal(value)  # OpenInference's LangChain logs Python's notation
        value = read if isinstance(read, dict) else value
    if "traceloop.span.kind" in own and isinstance(value, dict):
        for name in ("inputs", "kwargs"):
            if isinstance(value.get(name), dict):
                return value[name]
    if isinstance(value, str) and value and not value.lstrip().startswith(("{", "[", '"', "null")):
        return {"input": value}
    return value


def _result(given: Any, span: Span) -> str | None:
    if given is None:
        return span.error or None
    text = result_text(given)
    return f"{text}\n{span.error}" if span.error and span.error not in ("error", text) else text


def short(span: Span, *names: str) -> str:
    """The first of some attributes that is a short text."""
    values = (span.attributes.get(name) for name in names)
    return next((value for value in values if isinstance(value, str) and value and len(value) <= 500), "")
