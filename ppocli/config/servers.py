"""Rules between the keys of servers that sample (``rollout.engine=vllm``) and all others."""

from ppocli.config import adapters, algorithm, schema
from ppocli.config.keys import Rules
from ppocli.config.secrets import VARIABLE, why_no_url
from ppocli.text import cut


def server_rules(config: schema.TrainConfig) -> Rules:
    """Servers that sample: their addresses, and what can't be sent to them."""
    rollout, own = config.rollout, schema.RolloutConfig()
    if rollout.engine != "vllm":
        for name in ("urls", "token_env", "timeout", "concurrency", "weights_dir"):
            yield (getattr(rollout, name) != getattr(own, name),
                   f"rollout.{name}, rollout.engine",
                   f"{name} belongs to servers: leave it out, or set rollout.engine=vllm")
        return
    yield (not rollout.urls, "rollout.urls",
           "vllm needs a server: give rollout.urls=[http://127.0.0.1:8000], and start it as "
           "`ppocli vllm-command` prints it")
    for url in rollout.urls:
        wrong = why_no_url(url)
        yield (wrong, "rollout.urls", "an address holds a secret (not shown): give the token by "
               "rollout.token_env=VARIABLE" if wrong == "a secret" else
               f"{cut(url, 80)} must be an address such as http://127.0.0.1:8000")
    yield (rollout.token_env is not None and not VARIABLE.fullmatch(rollout.token_env),
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
