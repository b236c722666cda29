"""Python literals as agents write them, read without evaluating anything.

Beyond :func:`ast.literal_eval`: JSON's ``true``, ``false`` and ``null`` are understood, a hexadecimal
number stays text (it is an address or a hash, and its digits matter), and only JSON-like values come out.
Size and nesting are limited, because Python's parser needs far more memory than its input and may exhaust
the stack on deep nesting; what exceeds the limits is ``None``, so the caller keeps the text as it is.
"""

from __future__ import annotations

import ast
import math
import re
import warnings

MAX_CHARACTERS = 1 << 18
MAX_NESTING = 64

_WORDS = {"true": True, "false": False, "null": None, "none": None}
_HEXADECIMAL = re.compile(r"0[xX][0-9a-fA-F]+")
_COLON_KEYWORD = re.compile(r"([{,]\s*)([A-Za-z_]\w*)\s*:")
_REFUSED = (SyntaxError, ValueError, TypeError, RecursionError, MemoryError)


class _NotLiteral(ValueError):
    """This expression is no JSON-like literal."""


def literal(text: str) -> object:
    """The JSON-like value of a Python or JSON literal; ``None`` where the text is none (or is ``None``)."""
    tree = _parse(text)
    if tree is None:
        return None
    try:
        return _value(tree)
    except _REFUSED:
        return None


def literal_call(inner: str) -> dict[str, object] | None:
    """Arguments from the text between a call's parentheses; ``None`` where it cannot be read.

    ``a=1``, ``a: 1`` and ``'a': 1`` name an argument; positional ones are collected under ``"args"``.
    """
    if not inner:
        return {}
    tree = _parse(f"f({inner})")
    if isinstance(tree, ast.Call) and isinstance(tree.func, ast.Name) and tree.func.id == "f":
        try:
            named = {k.arg: _value(k.value) for k in tree.keywords if k.arg is not None}
            placed = [_value(argument) for argument in tree.args]
        except _REFUSED:
            return None
        if len(named) != len(tree.keywords) or (placed and "args" in named):
            return None
        return {"args": placed, **named} if placed else named
    quoted = _COLON_KEYWORD.sub(r'\1"\2":', "{" + inner + "}") if len(inner) <= MAX_CHARACTERS else ""
    for candidate in ("{" + inner + "}", quoted):
        value = literal(candidate)
        if isinstance(value, dict):
            return value
    return None


def _parse(text: str) -> ast.expr | None:
    if len(text) > MAX_CHARACTERS or _nesting(text) > MAX_NESTING:
        return None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", SyntaxWarning)  # "\d" in data is not our typo
            return ast.parse(_prepare(text), mode="eval").body
    except _REFUSED:
        return None


def _prepare(text: str) -> str:
    """Line breaks inside quotes as ``\\n`` (agents write long texts over lines), hexadecimals in quotes."""
    out: list[str] = []
    quote, escaped, position = "", False, 0
    while position < len(text):
        character = text[position]
        number = None
        if not quote and character == "0" and not text[position - 1 : position].isalnum():
            number = _HEXADECIMAL.match(text, position)
        if number:
            out.append(f'"{number[0]}"')
            position = number.end()
            continue
        if quote and character == "\n":
            out.append("n" if escaped else "\\n")
        else:
            out.append(character)
        if escaped:
            escaped = False
        elif character == "\\":
            escaped = bool(quote)
        elif character == quote:
            quote = ""
        elif not quote and character in "\"'":
            quote = character
        position += 1
    return "".join(out)


def _nesting(text: str) -> int:
    """Bracket depth, strings not told apart: an upper bound that costs one pass."""
    depth = deepest = 0
    for character in text:
        if character in "([{":
            depth += 1
            deepest = max(deepest, depth)
        elif character in ")]}":
            depth -= 1
    return deepest


def _value(node: ast.expr) -> object:
    match node:
        case ast.Constant(value=str() | bool() | None):
            return node.value
        case ast.Constant(value=int() | float() as number):
            return _finite(number)
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() | float() as number)):
            return -_finite(number)
        case ast.List(elts=items) | ast.Tuple(elts=items):
            return [_value(item) for item in items]
        case ast.Dict(keys=keys, values=values):
            return {_key(key): _value(value) for key, value in zip(keys, values, strict=True)}
        case ast.Name(id=word) if word.lower() in _WORDS:
            return _WORDS[word.lower()]
        case _:
            raise _NotLiteral


def _finite(number: float) -> float:
    if isinstance(number, float) and not math.isfinite(number):
        raise _NotLiteral
    return number


def _key(node: ast.expr | None) -> str:
    if not isinstance(node, ast.Constant) or isinstance(node.value, bytes) or node.value is ...:
        raise _NotLiteral
    return str(node.value)
