"""What training refuses of models, prompts and servers, as far as it shows without weights."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

from ppocli.config import schema, tasks
from ppocli.data import prompt_set, sources
from ppocli.errors import PpocliError
from ppocli.estimate.outline import models_of
from ppocli.models.loading import model_config
from ppocli.models.loading.language_model import fit_vocabulary, stop_rules
from ppocli.models.loading.tokenizer import load_tokenizer
from ppocli.models.trunk import has_encoder
from ppocli.sampling.vllm.launch import check_python
from ppocli.tasks.ppo.session import max_prompt_tokens, refuse_short_reach


def check_models(config: schema.TrainConfig) -> None:
    """Hold the policy's configuration and tokenizer against the other settings.

    Raises:
        ConfigError, InputError, SamplerError: what training would be refused for, the first of it.
    """
    facts, tokenizer = model_config.read_lm(config.model), load_tokenizer(config.model)
    task = tasks.task_name(config)
    if config.rollout.launch:
        check_python(config.rollout)
    lm: Any = None
    with suppress(PpocliError):  # a model of which no outline can be made may train all the same
        lm = models_of(config, facts.config).lm
    if lm is not None:
        fit_vocabulary(tokenizer, lm, config.model)
        if task != "reward_model" and lm.get_output_embeddings() is not None:
            stop_rules(tokenizer, SimpleNamespace(  # type: ignore[arg-type]
                lm=lm, generation_config=SimpleNamespace(eos_token_id=None)), config.generation)
    if task not in tasks.DATA_TASKS:
        _check_prompts(config, facts, tokenizer)


def _check_prompts(config: schema.TrainConfig, facts: model_config.ModelFacts, tokenizer: Any
                   ) -> None:
    whole, cfg = has_encoder(facts), config.prompts
    room = max_prompt_tokens(config, facts)
    if any(path is not None and sources.names_hub_dataset(path)
           for path in (cfg.path, cfg.eval.path)):
        return
    how: Any = {"seed": config.seed, "max_prompt_tokens": room, "whole": whole}
    prompts = prompt_set.load_prompts(cfg, tokenizer, **how)
    prompt_set.load_eval_prompts(cfg, tokenizer, training=prompts, items=None, **how)
    value, reference = config.model.value, config.model.reference
    for key, path in (("model.reference.path", reference.path),
                      ("model.value.path", value.path if value.kind == "model" else None)):
        if path is not None:
            other = model_config.read_lm(replace(config.model, path=path, revision=None, peft=None))
            refuse_short_reach(config, key, path, other, prompts.token_ids, pair=whole)
