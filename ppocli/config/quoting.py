"""Text in the quotes of Hydra's override grammar, without Hydra."""

from __future__ import annotations

import re


def quoted(text: str) -> str:
    """``text`` as a quoted string of Hydra's override grammar."""
    # backslashes are escapes only where they stand before the closing or an inner quote
    escaped = re.sub(r"(\\*)'", lambda m: m[1] * 2 + r"\'", text)
    return "'" + re.sub(r"(\\+)\Z", lambda m: m[1] * 2, escaped) + "'"


def literal(text: str) -> str:
    """:func:`quoted`, and ``${`` in it is text too, not an interpolation."""
    return quoted(re.sub(r"(\\*)\$\{", lambda m: m[1] * 2 + r"\${", text))


def unquoted(text: str) -> str:
    """``text`` without the one pair of quotes around it and their escapes, if it has them."""
    if len(text) < 2 or text[0] != text[-1] or text[0] not in "'\"":
        return text
    return re.sub(rf"(\\+)(?={text[0]}|\Z)", lambda m: "\\" * (len(m[1]) // 2), text[1:-1])
