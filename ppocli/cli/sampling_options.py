"""What ``ppocli generate`` and ``ppocli chat`` share: their options, and whom they ask."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ppocli.cli.output import say
from ppocli.cli.working import split_words
from ppocli.errors import ConfigError

if TYPE_CHECKING:
    from ppocli.config.schema import GenerationConfig, ModelConfig, TrainConfig
    from ppocli.evaluation.player import Player
    from ppocli.parallel.backend import Backend
    from ppocli.runs.target import Target

MAX_SEED = 2**63
SHAPING = ("temperature", "top_k", "top_p")
"""sampling settings that count only where something is drawn"""

Step = Annotated[int | None, typer.Option("--step", metavar="N", show_default=False,
                                          help="The checkpoint of this step of the run.")]
Best = Annotated[bool, typer.Option("--best", help="The run's best checkpoint by evaluation.")]
Score = Annotated[bool, typer.Option("--score", help="Score each response with the run's reward.")]
Reward = Annotated[str | None, typer.Option(
    "--reward", metavar="IMPORT", show_default=False,
    help="Score with another reward: module:function, file.py:function or a built-in; its "
         "arguments follow as words, reward.kwargs.NAME=VALUE.")]
Against = Annotated[str | None, typer.Option(
    "--against", metavar="RUN|base", show_default=False,
    help="Ask a second model the same; base is the one that the run started from.")]
Seed = Annotated[int, typer.Option("--seed", metavar="N", min=0,
                                   help="Equal seeds give equal responses.")]
System = Annotated[str | None, typer.Option("--system", metavar="TEXT", show_default=False,
                                            help="A system message before each conversation.")]
MaxNew = Annotated[int | None, typer.Option("--max-new-tokens", metavar="N", show_default=False,
                                            help="Longest response in tokens.")]
MinNew = Annotated[int | None, typer.Option("--min-new-tokens", metavar="N", show_default=False,
                                            help="No end before this many tokens.")]
Temperature = Annotated[float | None, typer.Option("--temperature", metavar="T",
                                                   show_default=False,
                                                   help="Softmax temperature.")]
TopK = Annotated[int | None, typer.Option("--top-k", metavar="K", show_default=False,
                                          help="Sample among the K likeliest tokens (0: all).")]
TopP = Annotated[float | None, typer.Option("--top-p", metavar="P", show_default=False,
                                            help="Nucleus sampling (1: all).")]
Greedy = Annotated[bool, typer.Option("--greedy", help="Always take the likeliest token.")]
Stop = Annotated[list[str] | None, typer.Option("--stop", metavar="TEXT", show_default=False,
                                                help="A text that ends a response; repeatable.")]


@dataclass(frozen=True, slots=True)
class Asking:
    """Who is asked and how: what ``generate`` and ``chat`` have in common."""

    run: str | None = None
    words: tuple[str, ...] = ()
    """KEY=VALUE"""
    step: int | None = None
    best: bool = False
    against: str | None = None
    """a target, or the word ``base``"""
    score: bool = False
    reward: str | None = None
    seed: int = 0
    system: str | None = None
    flags: Mapping[str, Any] = field(default_factory=dict)
    """sampling settings by option; None: not given"""

    @property
    def scored(self) -> bool:
        """Whether answers get a score."""
        return self.score or self.reward is not None


@dataclass(frozen=True, slots=True)
class Named:
    """A model to be loaded."""

    name: str
    policy: str
    """checked folder, or Hub name"""
    cfg: ModelConfig
    """of the model that the policy is, or was trained from"""


@dataclass(frozen=True, slots=True)
class Cast:
    """Found, but not loaded yet. Made by :func:`find_cast`."""

    cfg: TrainConfig
    """how the first model was trained, or the defaults for a model that came from elsewhere"""
    from_run: bool
    models: tuple[Named, ...]
    """the one or two models"""


def asking_of(run: str | None, words: Sequence[str] | None, **options: Any) -> Asking:
    """Tell RUN from the words behind it, and check the options by themselves.

    Raises:
        ConfigError: something among the words is no KEY=VALUE, or wrong options.
    """
    try:
        found, rest = split_words(run, words)
    except ConfigError as error:
        error.fix = "prompts go behind an option: --prompt TEXT"
        raise
    asking = Asking(found, tuple(rest), **options)
    if asking.seed >= MAX_SEED:
        raise ConfigError(f"--seed {asking.seed} is too large.", where="--seed",
                          fix="a number below 2**63")
    _given_flags(asking)
    return asking


def find_cast(asking: Asking) -> Cast:
    """Find the models that are asked and their settings; nothing is loaded.

    Raises:
        ConfigError, CheckpointError, InputError: as :func:`ppocli.runs.target.find_target` and
            :func:`ppocli.launching.target_config.target_config`.
    """
    from ppocli.evaluation.request import EvalRequest
    from ppocli.launching.target_config import target_config
    from ppocli.runs.target import find_target

    target = find_target(asking.run, say=say, step=asking.step, best=asking.best)
    request = EvalRequest(words=asking.words, reward=asking.reward, against=asking.against)
    request.check()
    cfg = target_config(target, request.overrides(target), needs_reward=asking.scored,
                        needs_prompts=False)
    models = [_named(target, cfg.model)]
    other = request.find_against(target, cfg, say)
    if other is not None:
        models.append(_named(other, cfg.model if other.model == cfg.model.path else None))
    return Cast(cfg, target.run_dir is not None, tuple(models))


def _named(target: Target, cfg: ModelConfig | None) -> Named:
    """``cfg`` None: that of the target's own run, or the defaults."""
    from ppocli.config.resolved import CONFIG_FILE, read_config
    from ppocli.config.schema import ModelConfig

    if cfg is None:
        cfg = (ModelConfig(path=target.model) if target.run_dir is None
               else read_config(target.run_dir / CONFIG_FILE).model)
    return Named(target.name, target.model, cfg)


def load_players(cast: Cast, backend: Backend) -> list[Player]:
    """Load the one or two models.

    Raises:
        InputError: a model or its tokenizer is unusable.
    """
    from ppocli.evaluation.player import load_player, policy_config

    return [load_player(policy_config(model.cfg, model.policy), model.name, backend)
            for model in cast.models]


def sampling_of(asking: Asking, cast: Cast, player: Player | None) -> GenerationConfig:
    """Flags over words over the run's own settings; a model that came from elsewhere has those of
    its generation_config.json.

    Args:
        player: the model, loaded; not needed for a run.

    Raises:
        ConfigError: values out of range.
    """
    from ppocli.evaluation.player import changed_sampling, own_sampling

    changes: dict[str, Any] = {}
    if not cast.from_run and player is not None:
        worded = {word.lstrip("+~").partition("=")[0] for word in asking.words}
        changes = {name: value for name, value in own_sampling(player.loaded).items()
                   if f"generation.{name}" not in worded}
        if changes:
            say("sampling as its generation_config.json says: " + ", ".join(
                f"{name}={value}" for name, value in changes.items()))
    given = _given_flags(asking)
    sources = {**dict.fromkeys(changes, "generation_config.json"),
               **{name: _option(name) for name in given}}
    generation = changed_sampling(cast.cfg, {**changes, **given}, sources)
    say_idle(generation, [name for name in SHAPING if any(
        word.lstrip("+~").startswith(f"generation.{name}=") for word in asking.words)])
    return generation


def say_idle(generation: GenerationConfig, asked: Sequence[str]) -> None:
    """Say which of the settings that were ``asked`` for change nothing."""
    idle = [name for name in asked if name in SHAPING]
    if idle and not generation.do_sample:
        say(f"no effect: {', '.join(idle)}, as do_sample=false (--greedy) always takes the "
            "likeliest token")


def _given_flags(asking: Asking) -> dict[str, Any]:
    """The sampling flags that were given; those that shape a distribution ask for sampling.

    Raises:
        ConfigError: flags that exclude each other.
    """
    given = {name: value for name, value in asking.flags.items() if value is not None}
    shaping = sorted(given.keys() & set(SHAPING))
    if shaping and given.setdefault("do_sample", True) is False:
        raise ConfigError(f"--greedy takes the likeliest token; {_option(shaping[0])} would change "
                          "nothing.", where="command line", fix="give one of them")
    return given


def _option(name: str) -> str:
    named = {"do_sample": "--greedy", "stop_sequences": "--stop"}
    return named.get(name, "--" + name.replace("_", "-"))
