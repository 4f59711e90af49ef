"""Text in the quotes of Hydra's override grammar, without Hydra."""

from __future__ import annotations

import re


def quoted(text: str) -> str:
    """``text`` as a quoted string of Hydra's override grammar."""
    # backslashes are escapes only where they stand before the closing or an inner quote
    escaped = re.sub(r"(\\*)'", lambda m: m[1] * 2 + r"\'", text)
    return "'" + re.sub(r"(\\+)$", lambda m: m[1] * 2, escaped) + "'"


def unquoted(text: str) -> str:
    """``text`` without the one pair of quotes around it, if it has them."""
    return text[1:-1] if len(text) > 1 and text[0] == text[-1] and text[0] in "'\"" else text
