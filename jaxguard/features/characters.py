"""Texts as they can be encoded and shown: no lone surrogates, nothing that moves a cursor."""

from __future__ import annotations

import unicodedata

_BIDI = frozenset("\u200e\u200f\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069")


def well_formed(text: str) -> str:
    """Return ``text`` with surrogate pairs joined and lone surrogates replaced by U+FFFD.

    Python strings may hold surrogates (``json.loads`` lets them through), UTF-8 and tokenizers may not.
    """
    if text.isascii():
        return text
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    return text


def visible(text: str) -> str:
    """Text without characters that move a cursor, reverse the reading order or break a line.

    Line breaks and tabs become spaces; other control characters, lone surrogates and bidirectional
    overrides become U+FFFD, so that nobody can hide an argument from a reviewer.
    """
    return "".join(_visible(c) for c in text)


def _visible(char: str) -> str:
    if char in "\n\r\t\u2028\u2029":
        return " "
    return "\ufffd" if char in _BIDI or unicodedata.category(char) in ("Cc", "Cs") else char
