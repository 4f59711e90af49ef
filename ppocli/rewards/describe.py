"""Words for messages about user code: where it lies, where it raised, what a text looked like."""

from __future__ import annotations

import inspect
import os
import traceback
from typing import Any

from ppocli.config.secrets import hide_secrets

SHOWN_CHARS = 100
"""longest piece of a sample that a message shows"""


def shorten(text: str) -> str:
    """``text`` as one quoted line of at most about 100 characters, the middle left out."""
    text = hide_secrets(text)  # half of a token is no longer known as one
    if len(text) > SHOWN_CHARS:
        half = SHOWN_CHARS // 2
        text = f"{text[:half]} ... {text[-half:]}"
    return repr(text)


def short_path(path: str) -> str:
    """``path`` relative to the current folder when it lies inside, else as it is."""
    here = os.getcwd() + os.sep
    return path[len(here):] if path.startswith(here) else path


def code_home(target: Any) -> tuple[str | None, int | None]:
    """File and first line of a function, class or callable object; ``None`` where unknown."""
    target = inspect.unwrap(getattr(target, "func", target))
    if not (inspect.isroutine(target) or inspect.isclass(target)):
        target = type(target)
    try:
        return inspect.getsourcefile(target), inspect.getsourcelines(target)[1]
    except (TypeError, OSError):
        return None, None


def raised_at(error: BaseException, file: str | None = None) -> str | None:
    """``FILE:LINE`` where ``error`` was raised.

    The innermost frame inside ``file`` when the traceback passes through it (that is the user's own
    line rather than a library's), else the innermost frame outside the import machinery.
    """
    if isinstance(error, SyntaxError) and error.filename:
        return f"{short_path(error.filename)}:{error.lineno}"
    frames = [frame for frame in traceback.extract_tb(error.__traceback__)
              if not frame.filename.startswith("<frozen importlib")]
    own = [frame for frame in frames if file is not None and frame.filename == file]
    for frame in reversed(own or frames):
        return f"{short_path(frame.filename)}:{frame.lineno}"
    return None
