"""One trip in every notation of spans, and the containers that spans are exported in."""

from __future__ import annotations

import json

TOOL = "execute_tool"
ASK = [("system", "You book trips."), ("user", "Book a train to Ulm.")]
PLAN = ("assistant", "", [("c1", "find", {"to": "Ulm"}), ("c2", "weather", {"in": "Ulm"})])
FOUND, SUN = ("tool", "c1", "train 7"), ("tool", "c2", "sunny")
BOOK = ("assistant", "", [("c3", "book", {"train": 7})])
BOOKED = ("tool", "c3", "seat 12")
DONE = ("assistant", "Booked seat 12.", [])


def semconv(given, answered):
    def told(message):
        if message[0] == "tool":
            return {"role": "tool", "parts": [{"type": "tool_call_response", "id": message[1], "response": message[2]}]}
        calls = [
            {"type": "tool_call", "id": i, "name": n, "arguments": a} for i, n, a in (message[2:] and message[2]) or ()
        ]
        return {
            "role": message[0],
            "parts": [*([{"type": "text", "content": message[1]}] if message[1] else []), *calls],
        }

    return {
        "gen_ai.operation.name": "chat",
        "gen_ai.request.model": "m1",
        "gen_ai.input.messages": json.dumps([told(m) for m in given]),
        "gen_ai.output.messages": json.dumps([told(m) for m in answered]),
    }


def flat(prefix, messages, names):
    """One attribute a leaf: OpenLLMetry's and OpenInference's way."""
    message, call, function = names
    made = {}
    for index, (role, first, *more) in enumerate(messages):
        at = f"{prefix}.{index}.{message}"
        made[f"{at}role"] = role
        if role == "tool":
            made |= {f"{at}tool_call_id": first, f"{at}content": more[0]}
            continue
        if first:
            made[f"{at}content"] = first
        for number, (own, tool, arguments) in enumerate(more[0] if more else ()):
            place = f"{at}tool_calls.{number}.{call}"
            made |= {f"{place}id": own, f"{place}{function}name": tool}
            made[f"{place}{function}arguments"] = json.dumps(arguments)
    return made


def openinference(given, answered):
    names = ("message.", "tool_call.", "function.")
    return (
        {"openinference.span.kind": "LLM", "llm.model_name": "m1"}
        | flat("llm.input_messages", given, names)
        | flat("llm.output_messages", answered, names)
    )


def openllmetry(given, answered):
    names = ("", "", "")
    return (
        {"llm.request.type": "chat", "gen_ai.request.model": "m1"}
        | flat("gen_ai.prompt", given, names)
        | flat("gen_ai.completion", answered, names)
    )


def adk(given, answered):
    def content(message):
        if message[0] == "tool":
            answer = {"id": message[1], "name": "t", "response": message[2]}
            return {"role": "user", "parts": [{"function_response": answer}]}
        calls = [{"function_call": {"id": i, "name": n, "args": a}} for i, n, a in (message[2:] and message[2]) or ()]
        role = "model" if message[0] == "assistant" else "user"
        return {"role": role, "parts": [*([{"text": message[1]}] if message[1] else []), *calls]}

    told = [content(m) for m in given if m[0] != "system"]
    request = {"config": {"system_instruction": given[0][1]}, "contents": told}
    return {
        "gen_ai.request.model": "m1",
        "gcp.vertex.agent.llm_request": json.dumps(request),
        "gcp.vertex.agent.llm_response": json.dumps({"content": content(answered[0])}),
    }


def events(given, answered):
    """A span's old events; they stand beside the attributes under a name of the tests' own."""

    def calls(message):
        made = [
            {"id": i, "function": {"name": n, "arguments": json.dumps(a)}} for i, n, a in (message[2:] and message[2])
        ]
        return {"tool_calls": json.dumps(made)} if made else {}

    told = []
    for message in given:
        if message[0] == "tool":
            told.append(("gen_ai.tool.message", {"id": message[1], "content": message[2]}))
        else:
            told.append(
                (f"gen_ai.{message[0]}.message", {"content": message[1], **(calls(message) if message[2:] else {})})
            )
    for message in answered:
        body = {"content": message[1], **{k: json.loads(v) for k, v in calls(message).items()}}
        told.append(("gen_ai.choice", {"index": 0, "finish_reason": "stop", "message": json.dumps(body)}))
    return {"gen_ai.operation.name": "chat", "gen_ai.request.model": "m1", "EVENTS": told}


NOTATIONS = [semconv, openinference, openllmetry, adk, events]


def span(own, parent, start, end, attributes, name="x", trace="t1"):
    attributes = dict(attributes)
    return {"trace": trace, "id": own, "parent": parent, "start": start, "end": end, "name": name,
            "events": attributes.pop("EVENTS", []), "attributes": attributes}  # fmt: skip


def tool_span(own, parent, start, end, tool, call_id=None, arguments=None, result=None, **more):
    attributes = {"gen_ai.operation.name": TOOL, "gen_ai.tool.name": tool}
    for key, value in (("id", call_id), ("arguments", arguments), ("result", result)):
        if value is not None:
            attributes[f"gen_ai.tool.call.{key}"] = value if isinstance(value, str) else json.dumps(value)
    return span(own, parent, start, end, attributes, f"execute_tool {tool}", **more)


def value_of(value):
    if isinstance(value, bool):
        return {"boolValue": value}
    if isinstance(value, int):
        return {"intValue": str(value)}
    if isinstance(value, list):
        return {"arrayValue": {"values": [value_of(v) for v in value]}}
    if isinstance(value, dict):
        return {"kvlistValue": {"values": [{"key": k, "value": value_of(v)} for k, v in value.items()]}}
    return {"stringValue": value}


def pairs(attributes):
    return [{"key": key, "value": value_of(value)} for key, value in attributes.items()]


def otlp(spans, scope="scopeSpans"):
    made = [
        {"traceId": s["trace"], "spanId": s["id"], "parentSpanId": s["parent"], "name": s["name"], "startTimeUnixNano":
         str(s["start"] * 1000), "endTimeUnixNano": str(s["end"] * 1000), "attributes": pairs(s["attributes"]),
         "events": [{"name": n, "attributes": pairs(fields)} for n, fields in s["events"]]}
        for s in spans
    ]  # fmt: skip
    return {"resource": {"attributes": pairs({"service.name": "trips"})}, scope: [{"scope": {}, "spans": made}]}


def resource_spans(spans):
    return {"resourceSpans": [otlp(spans)]}


def jaeger(spans):
    made = [
        {"traceID": s["trace"], "spanID": s["id"], "operationName": s["name"], "startTime": s["start"],
         "processID": "p1", "duration": s["end"] - s["start"],
         "tags": [{"key": k, "value": v} for k, v in s["attributes"].items()],
         "references": [{"refType": "CHILD_OF", "traceID": s["trace"], "spanID": s["parent"]}] if s["parent"] else [],
         "logs": [{"fields": [{"key": "event", "value": n}, *({"key": k, "value": v} for k, v in fields.items())]}
                  for n, fields in s["events"]]}
        for s in spans
    ]  # fmt: skip
    return {"data": [{"traceID": spans[0]["trace"], "spans": made, "processes": {"p1": {"serviceName": "trips"}}}]}


CONTAINERS = {
    "otlp": lambda spans: [resource_spans(spans)],
    "otlp under trace": lambda spans: [{"trace": resource_spans(spans)}],
    "a record a span, backwards": lambda spans: [resource_spans([s]) for s in reversed(spans)],
    "tempo": lambda spans: [{"batches": [otlp(spans)]}],
    "old tempo": lambda spans: [{"batches": [otlp([s], "instrumentationLibrarySpans") for s in spans]}],
    "jaeger": lambda spans: [jaeger(spans)],
}


def trip(notation=semconv, tools=True):
    """An agent with three turns and its tools; everything stands there as often as real logs repeat it."""
    spans = [
        span("a0", "", 0, 100, {"gen_ai.operation.name": "invoke_agent", "gen_ai.agent.name": "trips"}),
        span("a1", "a0", 1, 10, notation(ASK, [PLAN])),
        span("a4", "a0", 30, 40, notation([*ASK, PLAN, FOUND, SUN], [BOOK])),
        span("a6", "a0", 60, 70, notation([*ASK, PLAN, FOUND, SUN, BOOK, BOOKED], [DONE])),
    ]
    if tools:
        spans += [
            tool_span("a2", "a0", 11, 20, "find", "c1", {"to": "Ulm"}, "train 7"),
            tool_span("a3", "a0", 11, 25, "weather", "c2", {"in": "Ulm"}, "sunny"),
            tool_span("a5", "a0", 41, 50, "book", "c3", {"train": 7}, "seat 12"),
        ]
    return spans
