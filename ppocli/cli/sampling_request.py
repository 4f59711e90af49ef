"""What ``ppocli generate`` and ``ppocli chat`` are asked for: which models, sampled how."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import typer

from ppocli.cli import options, output
from ppocli.config import resolved, schema
from ppocli.config.schema_training import MAX_SEED
from ppocli.errors import ConfigError
from ppocli.evaluation.request import BASE, EvalRequest
from ppocli.launching.target_config import dated, target_config
from ppocli.models.loading.chat_template import decide_chat, present, stop_clock, tokenizers_of
from ppocli.runs import trust
from ppocli.runs.target import Target, find_target
from ppocli.storage.model_files import trained_with_template

if TYPE_CHECKING:
    from ppocli.evaluation.player import Player
    from ppocli.rewards.scoring import Reward

SHAPING = ("temperature", "top_k", "top_p", "min_p")
"""sampling settings that count only where something is drawn"""
_IDLE = ("ppo", "data", "sft", "reward_model", "task", "eval", "checkpoint", "tracking", "seed")
"""sections that say how to train"""
_READ_OF_PROMPTS = ("prompts.chat", "prompts.tools", "prompts.max_length")
"""how prompts are worded, and what servers that are started have room for"""
_OF_START = ("model.path", "model.revision", "model.tokenizer_path", "model.chat_template")
"""of the model that a run started from; what it has trained has its own"""


@dataclass(frozen=True, slots=True)
class SamplingRequest(EvalRequest):
    """What the command line says. Made by :func:`sampling_request`."""

    score: bool = False
    system: str | None = None
    chat: bool | None = None
    flags: Mapping[str, Any] = field(default_factory=dict)
    """sampling settings that options give"""

    @property
    def scored(self) -> bool:
        """Whether responses get a score."""
        return self.score or self.reward is not None


@dataclass(frozen=True, slots=True)
class ChosenModels:
    """One or two models, found but not loaded yet. Made by :func:`find_models`."""

    cfg: schema.TrainConfig
    """how the first model was trained, or the defaults for a model that came from elsewhere"""
    models: tuple[tuple[Target, schema.ModelConfig], ...]
    """each policy, and the configuration of the model that it is or was trained from"""
    chat: bool | None = None
    """whether prompts are rendered with the chat template; None where nothing decides it"""


def sampling_request(ctx: typer.Context) -> SamplingRequest:
    """What the command line of ``generate`` or ``chat`` asks for: RUN told from the words behind
    it, and the options checked by themselves.

    Raises:
        ConfigError: something among the words is no KEY=VALUE, or wrong options.
    """
    given = ctx.params
    try:
        run, words = output.split_words(given["run"], given["overrides"])
    except ConfigError as error:
        error.fix = "prompts need an option: --prompt TEXT"
        raise
    if given["seed"] >= MAX_SEED:
        raise ConfigError(f"--seed {given['seed']} is too large.", where="--seed",
                          fix="a number below 2**63")
    flags = {name: given[name] for name in (*SHAPING, "max_new_tokens", "min_new_tokens",
                                            "repetition_penalty") if given[name] is not None}
    shaping = [name for name in SHAPING if name in flags]
    if shaping and given["greedy"]:
        raise ConfigError(f"--greedy takes the most likely token; {_option(shaping[0])} would "
                          "change nothing.", where="command line", fix="give one of them")
    if shaping or given["greedy"]:
        flags["do_sample"] = not given["greedy"]
    if given["ignore_eos"]:
        flags["ignore_eos"] = True
    if given["stop"]:
        flags["stop_sequences"] = [output.typed_text("--stop", text) for text in given["stop"]]
    system = given["system"] and output.typed_text("--system", given["system"])
    return options.request_of(SamplingRequest, ctx, run=run, words=tuple(words), flags=flags,
                              system=system)


def find_models(request: SamplingRequest) -> ChosenModels:
    """Find the models and their settings; nothing is loaded.

    Raises:
        ConfigError, CheckpointError, InputError: as :func:`ppocli.runs.target.find_target` and
            :func:`ppocli.launching.target_config.target_config`.
    """
    target = find_target(request.run, say=output.say, step=request.step, best=request.best)
    judged = replace(request, seed=None, num_samples=None)  # these choose no model
    judged.check()
    cfg = target_config(target, judged.overrides(target), needs_reward=request.scored,
                        needs_prompts=False, trusts=request.trust, say=output.say)
    if any(word.startswith("rollout.") for word in request.words) and cfg.rollout.engine != "vllm":
        raise ConfigError("Responses are sampled by our own loop here, or by vLLM servers.",
                          where="rollout", fix="rollout.engine=vllm rollout.urls=[URL], or no "
                          "words that begin with rollout.; ppocli eval takes all of them")
    _refuse_idle(request, () if target.run_dir is None or request.against == BASE
                 else _OF_START)
    cfg = resolved.with_values(cfg, {
        "model.chat_template_date": cfg.model.chat_template_date or present()})
    models = [(target, cfg.model)]
    if (other := judged.find_against(target, cfg, output.say)) is not None:
        if cfg.rollout.engine == "vllm":
            raise ConfigError("Servers have the weights of one model.", where="--against",
                              fix="leave --against out, and ask for the other one by itself")
        models.append((other, cfg.model if other.model == cfg.model.path
                       else _trained_from(other, request.trust)))
    return ChosenModels(cfg, tuple(models), _chat(request, cfg, models))


def _chat(request: SamplingRequest, cfg: schema.TrainConfig,
          models: Sequence[tuple[Target, schema.ModelConfig]]) -> bool | None:
    """Whether prompts are rendered with the chat template: the option or key that says so, else as
    the run's were, else as ppocli trained the first model. What decided is said."""
    if request.chat is not None and request.sets("prompts.chat"):
        raise ConfigError("--chat, --no-chat and prompts.chat set the same thing.",
                          where="command line", fix="give one of them")
    explicit = request.chat is not None or request.sets("prompts.chat")
    chat = cfg.prompts.chat if request.chat is None else request.chat
    for number, (target, model) in enumerate(models):
        revision = model.revision if target.model == model.path else None
        trained = trained_with_template(target.model, revision)
        decided, why = decide_chat(bool(chat) if number else chat, trained, target.name,
                                   on="--chat", off="--no-chat")
        if why is not None:
            output.say(why)
        if not number:
            # of prompts that bring the template's words with them a run knows no more
            chat = None if decided is False and trained is None and not explicit else decided
    return chat


def _refuse_idle(request: SamplingRequest, idle: tuple[str, ...]) -> None:
    """Refuse words that change nothing of responses to prompts that are given, and those that are
    ``idle``."""
    for key in (word.lstrip("+~").partition("=")[0] for word in request.words):
        section, dot, _ = key.partition(".")
        unscored = section == "reward" and not request.scored
        if (unscored or section in _IDLE or key in idle or key.startswith("generation.eval.")
                or (section == "prompts" and dot and key not in _READ_OF_PROMPTS)):
            raise ConfigError(f"{key} would change nothing of the responses.", where="command line",
                              fix="leave it out" + ("; --score has them scored" if unscored else
                                                    "; --seed N is theirs" * (key == "seed")))


def _trained_from(target: Target, trusts: bool) -> schema.ModelConfig:
    """The model's part of the target's own run, or the defaults."""
    if target.run_dir is None:
        return schema.ModelConfig(path=target.model, chat_template_date=present())
    cfg = resolved.read_config(target.run_dir / resolved.CONFIG_FILE)
    trust.check_run(target.run_dir, cfg, ("model.",), trusts=trusts)
    return dated(cfg.model, target)


@contextmanager
def loaded(request: SamplingRequest, chosen: ChosenModels, columns: Sequence[str] = ()
           ) -> Iterator[tuple[list[Player], schema.GenerationConfig, Reward | None]]:
    """The models, how they sample, and the reward where responses are scored.

    Args:
        columns: of metadata, which the reward gets.

    Raises:
        ConfigError: settings out of range.
        InputError: a model or its tokenizer is unusable.
        RewardError: the reward can't be made.
    """
    from ppocli.evaluation.player import build_judge, load_player, served
    from ppocli.models.loading.model_config import policy_config
    from ppocli.parallel.backend import open_backend

    # before anything is loaded
    run_dir = chosen.models[0][0].run_dir
    generation = None if run_dir is None else sampling_of(request, chosen, None)
    reward = build_judge(chosen.cfg.reward, list(columns)) if request.scored else None
    for tokenizer in [] if reward is None else tokenizers_of(reward):
        stop_clock(tokenizer, chosen.cfg.model.chat_template_date)
    with ExitStack() as stack:
        backend = stack.enter_context(open_backend(chosen.cfg.hardware, run_dir))
        players = [load_player(policy_config(cfg, target.model), target.name, backend)
                   for target, cfg in chosen.models]
        if chosen.cfg.rollout.engine == "vllm":
            players = [stack.enter_context(served(players[0], chosen.cfg, backend))]
        yield players, generation or sampling_of(request, chosen, players[0]), reward


def sampling_of(request: SamplingRequest, chosen: ChosenModels, player: Player | None
                ) -> schema.GenerationConfig:
    """Flags over words over the run's own settings; a model that came from elsewhere has those of
    its generation_config.json.

    Args:
        player: the model, loaded; not needed for a run.

    Raises:
        ConfigError: values out of range.
    """
    from ppocli.evaluation.player import changed_sampling, own_sampling

    declared = {} if player is None else own_sampling(player.loaded)
    changes = {name: value for name, value in declared.items()
               if not request.sets(f"generation.{name}")}
    if changes:
        output.say("sampling as its generation_config.json says: " + ", ".join(
            f"{name}={value}" for name, value in changes.items()))
    sources = {**dict.fromkeys(changes, "generation_config.json"),
               **{name: _option(name) for name in request.flags}}
    generation = changed_sampling(chosen.cfg, {**changes, **request.flags}, sources)
    say_idle(generation, [name for name in SHAPING if request.sets(f"generation.{name}")])
    return generation


def say_idle(generation: schema.GenerationConfig, asked: Sequence[str]) -> None:
    """Say which of the settings that were ``asked`` for change nothing."""
    idle = [name for name in asked if name in SHAPING]
    if idle and not generation.do_sample:
        output.say(f"no effect: {', '.join(idle)}, as do_sample=false (--greedy) always takes the "
                   "likeliest token")


def _option(name: str) -> str:
    named = {"do_sample": "--greedy", "stop_sequences": "--stop"}
    return named.get(name, "--" + name.replace("_", "-"))
