"""Steps of a response, for rewards that score each of them: where one ends."""

import re
from itertools import pairwise


def separated(text: str, separator: str) -> list[int]:
    """Where the steps of a text end, in characters: behind each separator, and with the text. What
    holds nothing but separators and white space is no step: it belongs to the one before it, at the
    beginning of the text to the first."""
    ends, start = list[int](), 0
    for end in [*(found.end() for found in re.finditer(re.escape(separator), text)), len(text)]:
        if text[start:end].replace(separator, "").strip():
            ends.append(end)
        elif ends:
            ends[-1] = end
        start = ends[-1] if ends else 0
    return ends or [len(text)] * bool(text)


def texts(text: str, ends: list[int]) -> list[str]:
    """The steps themselves."""
    return [text[start:end] for start, end in pairwise([0, *ends])]
