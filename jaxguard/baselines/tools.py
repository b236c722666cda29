"""What kind of thing a tool does, told by its name alone."""

from __future__ import annotations

from jaxguard.baselines.keywords import words

OTHER = "other"
_NAMES = {
    "remove": "delete remove purge wipe erase drop destroy retire revoke cancel clear uninstall discard close",
    "pay": "pay payment transfer withdraw purchase buy refund order charge",
    "grant": "grant allow permit permission role admin share invite password unlock disable enable",
    "send": "send mail email post publish upload forward reply message notify submit deliver report",
    "run": "run execute exec eval shell bash terminal python install deploy start launch command",
    "write": "write create add update set edit save make modify insert append schedule book rename move copy summarise "
    "summarize redact fill draft",
    "read": "read get list show open search find view fetch check lookup query browse preview inspect load download "
    "see describe status calendar",
}
KINDS = {kind: frozenset(names.split()) for kind, names in _NAMES.items()}
CHANGES = ("write", "remove")
"""Kinds of tools that make things, or take them away."""


def tool_kind(tool: str) -> str:
    """The kind of the first word of the name that tells one, else :data:`OTHER`."""
    for word in words(tool):
        for kind, known in KINDS.items():
            if word in known:
                return kind
    return OTHER
