"""Texts that someone else's code wrote, such as an exception's message, before a person reads them
or a file keeps them."""

from __future__ import annotations

import re

from ppocli.config.secrets import hide_secrets

# controls, line separators, changes of writing direction, lone surrogates
CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


def sayable(text: str) -> str:
    """``text`` without secrets, and with control characters, which may be terminal escapes,
    spelled out: ``\\x1b``. Lines and tabs stay."""
    return CONTROL.sub(lambda match: repr(match[0])[1:-1],
                       hide_secrets(text).replace("\r\n", "\n"))
