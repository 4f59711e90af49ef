"""Files that come with ppocli: models and prompts (``builtin:NAME``), config groups, recipes."""

from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from ppocli.config.text import nearest
from ppocli.errors import InputError

BUILTIN_PREFIX = "builtin:"
_DATA = Path(__file__).parent / "data"
_BUILTINS = {
    "model": ("reviews", "randomwalks", "guess-number", "calculator"),
    "reward": ("reviews-sentiment",),
    "prompts": ("reviews-prompts", "reviews-eval-prompts", "randomwalks-prompts",
                "calculator-prompts", "calculator-eval-prompts", "everyday-prompts",
                "everyday-eval-prompts"),
    "data": ("pipeline-sft", "pipeline-sft-eval", "pipeline-pairs", "pipeline-pairs-eval",
             "arithmetic", "arithmetic-eval")}
"""section of the configuration -> names; the README beside this file describes them"""
BUILTIN_REWARDS: Mapping[str, str] = {name: f"ppocli.rewards.{place}" for name, place in {
    "classifier": "reward_model:TextClassifier", "reward_model": "reward_model:RewardModel",
    "step_reward_model": "reward_model:StepRewardModel", "http": "remote:HttpReward",
    "length": "rules:Length", "keyword": "rules:Keyword", "word_list": "rules:WordList",
    "step_word_list": "rules:StepWordList", "answer": "rules:Answer", "zero": "rules:zero",
    "math": "math_reward:Math", "judge": "judge:Judge",
    "randomwalks": "randomwalks:optimality"}.items()} | {
        "reasoning_gym": "ppocli.data.gym_tasks:ReasoningGym"}
"""values of ``reward.fn`` and the import paths they stand for"""
BUILTIN_STEPS = {"words": "ppocli.rewards.rules:words"}
"""values of ``reward.step_fn``"""
BUILTIN_ENVIRONMENTS: Mapping[str, str] = {
    "guess_number": "ppocli.environments.shipped:GuessNumber",
    "calculator": "ppocli.environments.shipped:Calculator",
    "openenv": "ppocli.environments.openenv_sessions:OpenEnv"}
"""values of ``env.fn``"""
LIBRARIES = {"math": "math_verify", "reasoning_gym": "reasoning_gym", "openenv": "openenv"}
"""values of ``reward.fn`` and ``env.fn``, and kinds of data, that need a library"""
TOOLS = "tools"
"""value of ``env.fn`` for the user's functions as tools (``env.tools``)"""


def list_builtins(*sections: str) -> list[str]:
    """Names (without ``builtin:``) of the built-in models and files for ``sections``; by default
    all."""
    return [name for section in sections or _BUILTINS for name in _BUILTINS[section]]


def resolve_builtin(name: str) -> Path:
    """The folder or file of ``NAME`` or ``builtin:NAME``.

    Models are plain Hugging Face folders; prompt files are JSON lines with a ``prompt`` column.

    Raises:
        InputError: there is no built-in of that name, or its files are missing.
    """
    bare = name.removeprefix(BUILTIN_PREFIX)
    if bare not in (names := list_builtins()):
        near = nearest(bare, names, count=1)
        hint = f"did you mean {BUILTIN_PREFIX}{near[0]}? " if near else ""
        raise InputError(f"there is no built-in model or prompt file named {bare!r}", where=name,
                         fix=f"{hint}known: " + ", ".join(BUILTIN_PREFIX + each for each in names))
    is_folder = bare in list_builtins("model", "reward")
    path = _DATA / (bare if is_folder else f"{bare.replace('-', '_')}.jsonl")
    if not path.exists():
        raise InputError(f"the files of {BUILTIN_PREFIX}{bare} are missing from this installation",
                         where=str(path), fix="install ppocli again")
    return path


@cache
def shipped_table(name: str) -> Any:
    """The content of a YAML file beside this one, cached: callers must not change it."""
    import yaml

    return yaml.safe_load(Path(__file__).with_name(name).read_text(encoding="utf-8"))


def shipped(name: str) -> Path:
    """The absolute path of a shipped folder: ``conf`` or ``recipes``.

    In a wheel it lies inside the package, in a checkout (or an editable installation) beside it.

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
    recipes: dict[str, Path] = {}
    for folder in (Path.cwd() / "recipes", shipped("recipes")):
        if folder.is_dir():
            for file in sorted(folder.glob("*.yaml")):
                recipes.setdefault(file.stem, file)
    return recipes
