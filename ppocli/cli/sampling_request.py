"""The arguments of ``ppocli generate`` and ``ppocli chat``: which models, sampled how."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import typer

from ppocli.cli import options, output
from ppocli.config import config_yaml, schema
from ppocli.config.schema_training import MAX_SEED
from ppocli.errors import ConfigError
from ppocli.evaluation.eval_request import BASE, EvalRequest
from ppocli.launch.target_config import dated, target_config
from ppocli.models.loading.chat_template import decide_chat, present, stop_clock, tokenizers_of
from ppocli.runs import trust
from ppocli.runs.model_files import trained_with_template
from ppocli.runs.target import Target, find_target

if TYPE_CHECKING:
    from ppocli.evaluation.player import Player
    from ppocli.rewards.scoring import Reward

SHAPING = ("temperature", "top_k", "top_p", "min_p")
"""sampling settings without effect under greedy decoding"""
_IDLE = ("ppo", "data", "sft", "reward_model", "task", "eval", "checkpoint", "tracking", "seed")
"""sections of training alone"""
_READ_OF_PROMPTS = ("prompts.chat", "prompts.tools", "prompts.max_length")
"""how prompts are rendered, and the room of servers"""
_OF_START = ("model.path", "model.revision", "model.tokenizer_path", "model.chat_template")
"""of the model that a run started from; the trained model has its own"""


@dataclass(frozen=True, slots=True)
class SamplingRequest(EvalRequest):
    """The command line. Made by :func:`sampling_request`."""

    score: bool = False
    system: str | None = None
    chat: bool | None = None
    flags: Mapping[str, Any] = field(default_factory=dict)
    """sampling settings from options"""

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
    """The arguments of ``generate`` or ``chat``, the options checked by themselves.

    Raises:
        ConfigError: a word is no KEY=VALUE, or options are wrong.
    """
    options_set = ctx.params
    try:
        run, words = output.split_words(options_set["run"], options_set["overrides"])
    except ConfigError as error:
        error.fix = "prompts need an option: --prompt TEXT"
        raise
    if options_set["seed"] >= MAX_SEED:
        raise ConfigError(f"--seed {options_set['seed']} is too large.", where="--seed",
                          fix="a number below 2**63")
    flags = {name: options_set[name] for name in (
        *SHAPING, "max_new_tokens", "min_new_tokens", "repetition_penalty")
        if options_set[name] is not None}
    shaping, greedy = [name for name in SHAPING if name in flags], options_set["greedy"]
    if shaping and greedy:
        raise ConfigError(f"--greedy takes the most likely token; {_option(shaping[0])} would "
                          "change nothing.", where="command line", fix="give one of them")
    if shaping or greedy:
        flags["do_sample"] = not greedy
    if options_set["ignore_eos"]:
        flags["ignore_eos"] = True
    if stops := options_set["stop"]:
        flags["stop_sequences"] = [output.typed_text("--stop", text) for text in stops]
    system = options_set["system"] and output.typed_text("--system", options_set["system"])
    return options.request_of(SamplingRequest, ctx, run=run, words=tuple(words), flags=flags,
                              system=system)


def find_models(request: SamplingRequest) -> ChosenModels:
    """Find the models and their settings; nothing is loaded.

    Raises:
        ConfigError, CheckpointError, InputError: as :func:`ppocli.runs.target.find_target` and
            :func:`ppocli.launch.target_config.target_config`.
    """
    target = find_target(request.run, say=output.say, step=request.step, best=request.best)
    for_models = replace(request, seed=None, num_samples=None)
    for_models.check()
    cfg = target_config(target, for_models.overrides(target), needs_reward=request.scored,
                        needs_prompts=False, trusts=request.trust, say=output.say)
    if any(word.startswith("rollout.") for word in request.words) and cfg.rollout.engine != "vllm":
        raise ConfigError("Responses are sampled by our own loop here, or by vLLM servers.",
                          where="rollout", fix="rollout.engine=vllm rollout.urls=[URL], or no "
                          "words that begin with rollout.; ppocli eval takes all of them")
    _refuse_idle(request, () if target.run_dir is None or request.against == BASE
                 else _OF_START)
    cfg = config_yaml.with_values(cfg, {
        "model.chat_template_date": cfg.model.chat_template_date or present()})
    models = [(target, cfg.model)]
    if (other := for_models.find_against(target, cfg, output.say)) is not None:
        if cfg.rollout.engine == "vllm":
            raise ConfigError("Servers have the weights of one model.", where="--against",
                              fix="leave --against out, and ask for the other one by itself")
        models.append((other, cfg.model if other.model == cfg.model.path
                       else _trained_from(other, request.trust)))
    return ChosenModels(cfg, tuple(models), _chat(request, cfg, models))


def _chat(request: SamplingRequest, cfg: schema.TrainConfig,
          models: Sequence[tuple[Target, schema.ModelConfig]]) -> bool | None:
    """Whether prompts are rendered with the chat template: by the option or key, else as in the
    run, else as ppocli trained the first model. The reason is printed."""
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
            # prompts of a run may have brought the template's words with them
            chat = None if decided is False and trained is None and not explicit else decided
    return chat


def _refuse_idle(request: SamplingRequest, idle: tuple[str, ...]) -> None:
    """Refuse words that can't change a response, and those for the keys ``idle``."""
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
    cfg = config_yaml.read_config(target.run_dir / config_yaml.CONFIG_FILE)
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
    from ppocli.distributed.backend import open_backend
    from ppocli.evaluation.player import build_judge, load_player, served
    from ppocli.models.loading.model_config import policy_config

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
    """The sampling: flags over words over the run's settings, or over the model's
    generation_config.json without a run.

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


def say_idle(generation: schema.GenerationConfig, names: Sequence[str]) -> None:
    """Print which of the settings ``names`` have no effect."""
    idle = [name for name in names if name in SHAPING]
    if idle and not generation.do_sample:
        output.say(f"no effect: {', '.join(idle)}, as do_sample=false (--greedy) always takes the "
                   "likeliest token")


def _option(name: str) -> str:
    named = {"do_sample": "--greedy", "stop_sequences": "--stop"}
    return named.get(name, "--" + name.replace("_", "-"))
