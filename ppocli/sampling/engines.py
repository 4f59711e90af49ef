"""What ``rollout.engine`` names."""

from collections.abc import Callable

from ppocli.config import schema
from ppocli.errors import ConfigError
from ppocli.models.loading.model_config import ModelFacts
from ppocli.parallel.backend import Backend
from ppocli.sampling.sampler import DecodeSampler, Sampler, SamplerSetup, TransformersSampler
from ppocli.sampling.vllm.command import most_tokens, served_name
from ppocli.sampling.vllm.launch import check_python
from ppocli.sampling.vllm.sampler import VllmSampler, check_servers
from ppocli.sampling.vllm.server import Server
from ppocli.user_code import Kind, Wanted, build

ENGINES: dict[str, Callable[[SamplerSetup], Sampler]] = {
    "decode": DecodeSampler, "transformers": TransformersSampler, "vllm": VllmSampler}


def build_sampler(cfg: schema.RolloutConfig, setup: SamplerSetup) -> Sampler:
    """The sampler that ``rollout.engine`` names.

    Raises:
        ConfigError: its import path leads nowhere.
    """
    if cfg.engine in ENGINES:
        return ENGINES[cfg.engine](setup)
    return build(Wanted(cfg.engine, "rollout.engine", Kind("class", ConfigError)), setup,
                 key="rollout.kwargs", kwargs=cfg.kwargs)


def check_engine(cfg: schema.TrainConfig, backend: Backend, facts: ModelFacts, longest_prompt: int
                 ) -> None:
    """Find out, before weights are loaded, that servers are missing or serve something else. All
    ranks call it in step.

    Raises:
        SamplerError: which, and how to start it.
    """
    if cfg.rollout.engine != "vllm":
        return
    if cfg.rollout.launch:
        backend.ranks.first_does(lambda: check_python(cfg.rollout))
    else:
        backend.ranks.first_does(lambda: check_servers(
            [Server(url, cfg.rollout) for url in cfg.rollout.urls], served_name(cfg, facts.config),
            most_tokens(cfg, longest_prompt)))
