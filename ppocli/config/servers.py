"""Rules between the keys of servers that sample (``rollout.engine=vllm``) and all others."""

from dataclasses import fields

from ppocli.config import adapters, algorithm, keys, schema, secrets
from ppocli.text import cut


def server_rules(config: schema.TrainConfig) -> keys.Rules:
    """Servers that sample: their addresses, and what can't be sent to them."""
    rollout, own = config.rollout, schema.RolloutConfig()
    if rollout.engine != "vllm":
        for name in (f.name for f in fields(own) if f.name not in ("engine", "kwargs")):
            yield (getattr(rollout, name) != getattr(own, name), f"rollout.{name}, rollout.engine",
                   f"{name} belongs to servers: leave it out, or set rollout.engine=vllm")
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
