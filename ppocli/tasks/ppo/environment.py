"""The environment of a run, and the sampler that plays it."""

import logging

from ppocli.config import schema
from ppocli.data import prompt_set
from ppocli.environments.calls import Calls
from ppocli.environments.resolve import code_files, resolve
from ppocli.errors import ConfigError
from ppocli.sampling.episodes import EpisodeSampler
from ppocli.sampling.sampler import Sampler, SamplerSetup

log = logging.getLogger("ppocli")


def environment_of(cfg: schema.TrainConfig, prompts: prompt_set.PromptSet,
                   *others: prompt_set.PromptSet) -> Calls | None:
    """What plays ``env.fn``, tried once on the first prompt; None where there is none.

    Raises:
        RewardError: it can't be found, made or played.
    """
    if cfg.env.fn is None:
        return None
    for path in code_files(cfg.env):
        log.info("running code from %s", path)
    found, *_ = [resolve(cfg.env, list(one.columns)) for one in (prompts, *others)]
    calls = Calls(found, cfg.env, cfg.seed)
    calls.rehearse(prompts)
    if not calls.what.deterministic:
        log.warning("%s says that it keeps state outside (deterministic = False): a resumed run "
                    "plays other episodes than an uninterrupted one, and evaluations differ by "
                    "chance.", calls.what.label)
    return calls


def playing(setup: SamplerSetup, sampler: Sampler, calls: Calls | None) -> Sampler:
    """The sampler, with an environment that answers where there is one."""
    if calls is None:
        return sampler
    if setup.loaded.decoder_start is not None:
        raise ConfigError("An encoder-decoder answers a prompt once; episodes of several turns "
                          "need a causal model.", where="env.fn, model.path",
                          fix="leave env.fn out, or use another model")
    return EpisodeSampler(sampler, calls, setup.tokenizer, chat=setup.cfg.prompts.chat)
