"""Rules between keys of sampling (prompts, generation, engines and servers, environments), and the
maximum length of a sample."""

from dataclasses import fields

from ppocli.config import adapters, algorithm, keys, schema, secrets
from ppocli.config.text import cut, did_you_mean, shown

OUR_ENGINES = ("decode", "transformers", "vllm")
"""values of ``rollout.engine`` other than import paths"""


def longest_response(config: schema.TrainConfig) -> int:
    """Maximum number of tokens after a prompt, in rollouts and evaluations: of a response, or of an
    episode."""
    if config.env.fn is not None:
        return config.env.max_tokens
    generation = config.generation
    return max(generation.max_new_tokens, generation.eval.max_new_tokens or 0)


def longest_rollout(config: schema.TrainConfig) -> int:
    """As :func:`longest_response`, for rollouts alone."""
    return config.generation.max_new_tokens if config.env.fn is None else config.env.max_tokens


def prompt_rules(config: schema.TrainConfig, handed_in: frozenset[str]) -> keys.Rules:
    """Rules on ``prompts``."""
    inherited = config.prompts
    for prefix, prompts in (("prompts", inherited), ("prompts.eval", inherited.eval)):
        chat = inherited.chat if prompts.chat is None else prompts.chat
        yield ((prompts.chat or prompts.length_sampler) and chat
               and (prompts.length_sampler or inherited.length_sampler),
               f"{prefix}.length_sampler", "would cut off the end of the chat template")
        yield (prompts.tools is not None and not chat, f"{prefix}.tools",
               "is told to the chat template: set prompts.chat=true")
        yield (prompts.path is not None and prompts.items is not None,
               f"{prefix}.path, {prefix}.items",
               f"give a source or inline prompts, not both: {prefix}.items=null")
        yield (prompts.items is not None and not prompts.items, f"{prefix}.items",
               "must hold at least one prompt")
        yield _no_range(f"{prefix}.length_sampler", prompts.length_sampler)
        yield (prompts.template is not None and "{" not in prompts.template, f"{prefix}.template",
               f"{shown(prompts.template)} has no placeholder such as {{prompt}}")
    if inherited.path is None and inherited.items is None and "prompts.path" not in handed_in:
        for name in ("template", "first_words", "length_sampler"):
            yield (getattr(inherited, name) is not None, f"prompts.{name}",
                   "there are no prompts to apply it to: give prompts.path or prompts.items")


def _no_range(key: str, bounds: list[int] | None) -> tuple[bool, str, str]:
    """The rule that a key is [min, max]."""
    return (bounds is not None and (len(bounds) != 2 or bounds[0] > bounds[1]), key,
            f"{shown(bounds)} must be [min, max] with min at most max")


def generation_rules(config: schema.TrainConfig) -> keys.Rules:
    """Rules on ``generation``."""
    train, evaluation = config.generation, config.generation.eval
    shortest, longest = train.min_new_tokens, train.max_new_tokens
    yield (shortest > longest, "generation.min_new_tokens, generation.max_new_tokens",
           f"min_new_tokens {shortest} must be at most max_new_tokens {longest}: "
           f"generation.min_new_tokens={longest}")
    low = shortest if evaluation.min_new_tokens is None else evaluation.min_new_tokens
    high = evaluation.max_new_tokens or longest
    yield (shortest <= longest and low > high,
           "generation.eval.min_new_tokens, generation.eval.max_new_tokens",
           f"at evaluation min_new_tokens {low} must be at most max_new_tokens {high}")
    sampler = train.length_sampler
    no_range = _no_range("generation.length_sampler", sampler)
    yield no_range
    yield (sampler and not no_range[0] and (sampler[1] > longest or sampler[0] < shortest),
           "generation.length_sampler, generation.max_new_tokens, generation.min_new_tokens",
           f"{shown(sampler)} must lie between min_new_tokens {shortest} and max_new_tokens "
           f"{longest}: generation.length_sampler=null draws no lengths")
    yield ("" in train.stop_sequences, "generation.stop_sequences", "must not hold an empty text")
    yield (train.ignore_eos and config.reward.missing_eos_penalty and not train.stop_sequences
           and not train.stop_token_ids, "generation.ignore_eos, reward.missing_eos_penalty",
           "no response could end, and each would get the penalty: leave one of them out, "
           "or say what ends a response with generation.stop_sequences or stop_token_ids")


def engine_rules(config: schema.TrainConfig) -> keys.Rules:
    """Rules on ``rollout``: the user's sampler, or servers."""
    engine = config.rollout.engine
    yield (engine in OUR_ENGINES and config.rollout.kwargs, "rollout.kwargs, rollout.engine",
           f"{engine} takes no arguments: they are for a sampler of your own")
    yield (engine not in OUR_ENGINES and not keys.is_import_path(engine), "rollout.engine",
           f"{shown(engine)} must be one of {', '.join(OUR_ENGINES)}, or the import path of a "
           f"sampler of your own (my_sampler.py:Sampler){did_you_mean(engine, OUR_ENGINES)}")
    yield from _servers(config)


def _servers(config: schema.TrainConfig) -> keys.Rules:
    """Rules on servers that sample: their addresses, and settings that they don't support."""
    rollout, defaults = config.rollout, schema.RolloutConfig()
    if rollout.engine != "vllm":
        for name in (f.name for f in fields(defaults) if f.name not in ("engine", "kwargs")):
            default = getattr(defaults, name)
            yield (getattr(rollout, name) != default, f"rollout.{name}, rollout.engine",
                   f"{name} belongs to servers: leave it out (rollout.{name}={shown(default)} "
                   "where a run has it), or set rollout.engine=vllm")
        return
    yield (rollout.ahead and config.ppo.staleness, "rollout.ahead, ppo.staleness",
           "ahead=1 already trains on samples of the policy before: set one of them to 0")
    yield (rollout.ahead and config.env.fn is not None, "rollout.ahead, env.fn", "episodes take "
           "turns with their environment, which can't go on unattended: set rollout.ahead=0")
    yield (rollout.ahead and config.ppo.dynamic_sampling is not None,
           "rollout.ahead, ppo.dynamic_sampling", "which prompts to draw more of is known from "
           "scores, after the next step's samples were begun: set one of them to its default")
    yield (rollout.launch and rollout.python is None, "rollout.launch, rollout.python",
           "launch needs the Python of an environment that has vLLM: set rollout.python=PATH")
    yield (rollout.python is not None and not rollout.launch, "rollout.python, rollout.launch",
           "nothing is started: leave it out, or set rollout.launch=true")
    yield (rollout.launch and config.hardware.num_nodes > 1, "rollout.launch, hardware.num_nodes",
           "launch is for a run on one machine: start the servers by themselves")
    yield (not rollout.urls, "rollout.urls", "vllm needs a server: give "
           "rollout.urls=[http://127.0.0.1:8000], and start it as `ppocli vllm-command` prints it")
    yield (len({url.rstrip("/") for url in rollout.urls}) < len(rollout.urls), "rollout.urls",
           "an address is there twice: give each server once")
    for url in rollout.urls:
        wrong = secrets.why_no_url(url)
        yield (wrong, "rollout.urls", "an address holds a secret (not shown): give the token by "
               "rollout.token_env=VARIABLE" if wrong == "a secret" else
               f"{cut(url, 80)} must be an address such as http://127.0.0.1:8000")
    yield (rollout.token_env is not None and not secrets.VARIABLE.fullmatch(rollout.token_env),
           "rollout.token_env", "must be the name of an environment variable (not shown)")
    yield (config.model.quantization is not None, "rollout.engine, model.quantization",
           "servers take whole weights, and these are quantized: use rollout.engine=decode")
    yield (adapters.adapter_kind(config.model) in ("prefix", "prompt"),
           "rollout.engine, model.peft.type",
           "servers don't know virtual tokens: use lora, or rollout.engine=decode")
    yield (not algorithm.whole_while_acting(config), "rollout.engine, "
           "hardware.gather_for_generation", "servers take whole weights: set "
           "hardware.gather_for_generation=true")
    yield (config.ppo.logprobs_from == "decode", "rollout.engine, ppo.logprobs_from",
           "servers compute no values: set ppo.logprobs_from=auto; for ratios to their logprobs "
           "there is ppo.old_logprobs=sampler")


def env_rules(config: schema.TrainConfig, handed_in: frozenset[str]) -> keys.Rules:
    """Rules on environments."""
    env, reward = config.env, config.reward
    if env.fn is None:
        for name, value in vars(schema.EnvConfig()).items():
            yield (getattr(env, name) != value, f"env.{name}",
                   "this belongs to env.fn, which is not given")
        yield (config.ppo.gae_unit == "turn", "ppo.gae_unit, env.fn",
               "only an environment (env.fn) makes several turns")
        return
    yield (config.prompts.tools or config.prompts.eval.tools, "prompts.tools, env.fn",
           "an environment tells the chat template of tools of its own: env.tools")
    yield (config.prompts.eval.chat not in (None, config.prompts.chat), "prompts.eval.chat, env.fn",
           "an environment speaks as prompts.chat says: leave prompts.eval.chat out")
    tools = env.fn == "tools"
    yield (tools and not env.tools, "env.tools", "env.fn=tools plays these functions, and there "
           "are none: env.tools=[my_tools.py:search]")
    yield (not tools and env.tools, "env.tools, env.fn", "these are played by env.fn=tools")
    yield (tools and env.adapter is not None, "env.adapter, env.fn",
           "tools are functions, whichever library they were written for")
    scored = reward.fn is not None or reward.fns or "reward.fn" in handed_in
    yield ((tools or env.adapter == "trl") and not scored, "reward.fn, env.fn",
           "tools give no reward: name a function that scores the whole transcript")
    yield ((tools or env.adapter == "trl") and not config.prompts.chat, "prompts.chat, env.fn",
           "tools are called in the syntax of the chat template: set prompts.chat=true")
    yield (env.on_error == "drop" and reward.on_invalid != "skip",
           "env.on_error, reward.on_invalid",
           "dropped episodes have no score: set reward.on_invalid=skip")
    yield ("env" in reward.fns, "reward.fns.env", "an environment's own rewards have this name")
    longest = config.generation.max_new_tokens
    yield (longest > env.max_tokens, "generation.max_new_tokens, env.max_tokens",
           f"a turn of {longest} tokens doesn't fit an episode of {env.max_tokens}")
    for is_set, where, why in (
            (config.ppo.staleness > 0, "ppo.staleness", "samples that wait keep no episodes"),
            (reward.step_separator or reward.step_fn, "reward.step_separator, reward.step_fn",
             "an episode has turns in place of steps: an environment rewards each of them"),
            (config.generation.length_sampler, "generation.length_sampler",
             "the limit of a turn is the same for all"),
            (config.hardware.zero_stage == 3 and not config.hardware.gather_for_generation,
             "hardware.gather_for_generation", "episodes need whole weights on each process")):
        yield is_set, f"{where}, env.fn", f"not with an environment: {why}"
