"""Models and prompt files by name: what ``builtin:NAME`` stands for, without a network."""

from __future__ import annotations

import difflib
from pathlib import Path

from ppocli.errors import InputError

PREFIX = "builtin:"
_DATA = Path(__file__).parent / "data"
_SHIPPED = {
    "reviews": "reviews",
    "reviews-sentiment": "reviews-sentiment",
    "reviews-prompts": "reviews_prompts.jsonl",
    "reviews-eval-prompts": "reviews_eval_prompts.jsonl",
    "randomwalks-prompts": "randomwalks_prompts.jsonl",
}
_ABOUT = {
    "reviews": "language model of short film reviews (0.6M parameters)",
    "reviews-sentiment": "classifier of film reviews: NEGATIVE, POSITIVE",
    "reviews-prompts": "192 neutral openings of film reviews, for training",
    "reviews-eval-prompts": "64 other openings of film reviews, for evaluation",
    "randomwalks": "GPT-2 fitted to random walks on a graph (made on first use)",
    "randomwalks-prompts": "the 20 start nodes of the random walks",
}


def is_builtin(spelling: str) -> bool:
    """Whether a path given by the user names a built-in (``builtin:NAME``)."""
    return spelling.startswith(PREFIX)


def list_builtins() -> dict[str, str]:
    """Name (without ``builtin:``) and one line about each built-in model and prompt file."""
    return dict(_ABOUT)


def resolve_builtin(name: str) -> Path:
    """The folder or file that ``NAME`` or ``builtin:NAME`` stands for.

    Models are plain Hugging Face folders; prompt files are JSON lines with a ``prompt`` column.
    ``randomwalks`` is fitted on first use, in seconds, and cached (:mod:`ppocli.builtin.cache`);
    its data and fit have their own seed and leave the global random state alone.

    Raises:
        InputError: there is no built-in of that name, or its files are missing.
        DiskError: the cache folder can't be written.
    """
    bare = name.removeprefix(PREFIX)
    if bare == "randomwalks":
        from ppocli.builtin.cache import cached_folder
        from ppocli.builtin.walkmodel import WalkModelSettings, build_randomwalks

        settings = WalkModelSettings()
        return cached_folder(bare, settings, lambda folder: build_randomwalks(folder, settings))
    if bare not in _SHIPPED:
        near = difflib.get_close_matches(bare, _ABOUT, n=1, cutoff=0.5)
        hint = f"did you mean {PREFIX}{near[0]}? " if near else ""
        raise InputError(f"there is no built-in model or prompt file named {bare!r}", where=name,
                         fix=f"{hint}known: " + ", ".join(PREFIX + known for known in _ABOUT))
    path = _DATA / _SHIPPED[bare]
    if not path.exists():
        raise InputError(f"the files of {PREFIX}{bare} are missing from this installation",
                         where=str(path), fix="install ppocli again")
    return path
