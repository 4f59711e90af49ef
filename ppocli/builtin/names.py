"""What comes with ppocli: models and prompt files (``builtin:NAME``), config groups, recipes."""

from functools import cache
from pathlib import Path
from typing import Any

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
    "pipeline-sft": ("pipeline_sft.jsonl", "1200 requests for a film review, each with a review"),
    "pipeline-sft-eval": ("pipeline_sft_eval.jsonl", "64 other requests, each with a review"),
    "pipeline-pairs": ("pipeline_pairs.jsonl",
                       "2000 pairs of film reviews, a tenth of them the wrong way round"),
    "pipeline-pairs-eval": ("pipeline_pairs_eval.jsonl",
                            "400 pairs to other requests, as noisy"),
    "arithmetic": ("arithmetic.jsonl", "260 questions of arithmetic, in the form of GSM8K"),
    "arithmetic-eval": ("arithmetic_eval.jsonl", "64 others"),
    "guess-number": ("guess-number", "player of guess_number who hardly minds the answers "
                     "(0.1M parameters)"),
    "calculator": ("calculator", "player of calculator who rarely uses it (0.1M parameters)"),
    "calculator-prompts": ("calculator_prompts.jsonl", "512 products of two numbers of two digits"),
    "calculator-eval-prompts": ("calculator_eval_prompts.jsonl", "128 others"),
    "everyday-prompts": ("everyday_prompts.jsonl", "250 questions of daily life, for chat models"),
    "everyday-eval-prompts": ("everyday_eval_prompts.jsonl", "62 others"),
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


@cache
def shipped_table(name: str) -> Any:
    """What a YAML file beside this one holds; to be read only."""
    import yaml

    return yaml.safe_load(Path(__file__).with_name(name).read_text(encoding="utf-8"))


def shipped(name: str) -> Path:
    """The absolute path of a shipped folder: ``conf`` or ``recipes``.

    In a wheel they lie inside the package, in a checkout (or an editable installation) beside it.

    Raises:
        FileNotFoundError: the installation is broken; neither place has the folder.
    """
    package = Path(__file__).resolve().parent.parent
    for candidate in (package / name, package.parent / name):
        if candidate.is_dir():
            return candidate
    raise FileNotFoundError(f"the {name}/ folder of ppocli is in neither {package} nor "
                            f"{package.parent}: the installation is incomplete")


def config_groups() -> dict[str, list[str]]:
    """The shipped config groups and their options, e.g. ``{"model": ["randomwalks", ...]}``."""
    return {folder.name: sorted(file.stem for file in folder.glob("*.yaml"))
            for folder in sorted(shipped("conf").iterdir()) if folder.is_dir()}


def recipe_files() -> dict[str, Path]:
    """Recipe names and files: those of ``./recipes`` in the current folder, then the shipped."""
    found: dict[str, Path] = {}
    for folder in (Path.cwd() / "recipes", shipped("recipes")):
        if folder.is_dir():
            for file in sorted(folder.glob("*.yaml")):
                found.setdefault(file.stem, file)
    return found
