"""Episodes of several turns: rules on ``env``, and how long a sample may become with it."""

from ppocli.config import keys, schema


def longest_response(config: schema.TrainConfig) -> int:
    """Most tokens behind a prompt, in rollouts and evaluations: of a response, or of an episode."""
    if config.env.fn is not None:
        return config.env.max_tokens
    generation = config.generation
    return max([generation.max_new_tokens, *keys.several(generation.eval.max_new_tokens)])


def longest_rollout(config: schema.TrainConfig) -> int:
    """As :func:`longest_response`, in rollouts alone."""
    return config.generation.max_new_tokens if config.env.fn is None else config.env.max_tokens


def env_rules(config: schema.TrainConfig, handed_in: frozenset[str]) -> keys.Rules:
    """Rules on environments."""
    env, reward = config.env, config.reward
    if env.fn is None:
        for name, value in vars(env).items():
            if name != "fn" and value != getattr(schema.EnvConfig(), name):
                yield (True, f"env.{name}", "this belongs to env.fn, which is not given")
        yield (config.ppo.gae_unit == "turn", "ppo.gae_unit, env.fn",
               "only an environment (env.fn) makes several turns")
        return
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
    for wanted, where, why in (
            (config.ppo.staleness > 0, "ppo.staleness", "samples that wait keep no episodes"),
            (reward.step_separator or reward.step_fn, "reward.step_separator, reward.step_fn",
             "an episode has turns in place of steps: an environment rewards each of them"),
            (config.generation.length_sampler, "generation.length_sampler",
             "the limit of a turn is the same for all"),
            (config.hardware.zero_stage == 3 and not config.hardware.gather_for_generation,
             "hardware.gather_for_generation", "episodes need whole weights on each process")):
        yield wanted, f"{where}, env.fn", f"not with an environment: {why}"
