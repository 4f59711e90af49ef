"""Models and prompt files by name: what ``builtin:NAME`` stands for, without a network."""

from pathlib import Path

from ppocli.errors import InputError
from ppocli.text import nearest

BUILTIN_PREFIX = "builtin:"
_DATA = Path(__file__).parent / "data"
_BUILTINS = {  # name: its folder or file, and one line about it
    "reviews": ("reviews", "language model of short film reviews (0.6M parameters)"),
    "reviews-sentiment": ("reviews-sentiment", "classifier of film reviews: NEGATIVE, POSITIVE"),
    "reviews-prompts": ("reviews_prompts.jsonl",
                        "192 neutral openings of film reviews, for training"),
    "reviews-eval-prompts": ("reviews_eval_prompts.jsonl",
                             "64 other openings of film reviews, for evaluation"),
    "randomwalks": ("randomwalks", "GPT-2 fitted to random walks on a graph (1.5M parameters)"),
    "randomwalks-prompts": ("randomwalks_prompts.jsonl",
                            "the 20 start nodes of the random walks"),
}


def list_builtins() -> dict[str, str]:
    """Name (without ``builtin:``) and one line about each built-in model and prompt file."""
    return {name: about for name, (_, about) in _BUILTINS.items()}


def resolve_builtin(name: str) -> Path:
    """The folder or file that ``NAME`` or ``builtin:NAME`` stands for.

    Models are plain Hugging Face folders; prompt files are JSON lines with a ``prompt`` column.

    Raises:
        InputError: there is no built-in of that name, or its files are missing.
    """
    bare = name.removeprefix(BUILTIN_PREFIX)
    if bare not in _BUILTINS:
        near = nearest(bare, _BUILTINS, count=1)
        hint = f"did you mean {BUILTIN_PREFIX}{near[0]}? " if near else ""
        raise InputError(f"there is no built-in model or prompt file named {bare!r}", where=name,
                         fix=f"{hint}known: " + ", ".join(BUILTIN_PREFIX + known
                                                          for known in _BUILTINS))
    path = _DATA / _BUILTINS[bare][0]
    if not path.exists():
        raise InputError(f"the files of {BUILTIN_PREFIX}{bare} are missing from this installation",
                         where=str(path), fix="install ppocli again")
    return path
