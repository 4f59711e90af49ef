"""Checks of a run before it trains: ``ppocli validate`` checks models, tokenizers and prompts
without weights; ``--dry-run`` makes the first step in small, of which nothing is kept.

Within seconds a dry run shows how a prompt is rendered, how the reward scores real responses,
whether the reference agrees with the policy, and whether gradients are finite.
"""

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch

from ppocli.config import config_yaml, tasks
from ppocli.config.schema import TrainConfig
from ppocli.config.text import clean, figure
from ppocli.data import prompt_set, sources
from ppocli.distributed.backend import open_backend
from ppocli.distributed.stop import StopFlag
from ppocli.errors import DivergedError, OutOfMemoryError, PpocliError
from ppocli.models.loading import model_config
from ppocli.models.loading.language_model import fit_vocabulary
from ppocli.models.loading.tokenizer import load_tokenizer, stop_rules
from ppocli.models.memory import models_of
from ppocli.models.trunk import has_encoder
from ppocli.ppo import policy_samples
from ppocli.ppo.ppo_task import PPOTask
from ppocli.ppo.rollout import Rollout
from ppocli.ppo.session import max_prompt_tokens, refuse_short_reach
from ppocli.sampling.samples import Samples
from ppocli.training import loop, optimize, optimizers
from ppocli.training.state import PhaseClock, seed_generators
from ppocli.training.task import PythonObjects, StepContext, Task, TaskSetup, build_task

SAMPLES = 2
"""how many of the first step's samples are drawn"""
KL_TOLERANCE = {"fp32": 1e-3, "bf16": 5e-2}
"""nats per token by which rounding may part a policy from its copy"""


def check_models(cfg: TrainConfig) -> None:
    """Check the policy's configuration and tokenizer against the other settings, without weights.

    Raises:
        ConfigError, InputError, SamplerError: the first error that training would end with.
    """
    facts, tokenizer = model_config.read_lm(cfg.model), load_tokenizer(cfg.model)
    task = tasks.task_name(cfg)
    lm: Any = None
    with suppress(PpocliError):  # a model of which no outline can be made may train all the same
        lm = models_of(cfg, facts.config).lm
    if lm is not None:
        fit_vocabulary(tokenizer, lm, cfg.model)
        if task != "reward_model" and lm.get_output_embeddings() is not None:
            stop_rules(tokenizer, SimpleNamespace(  # type: ignore[arg-type]
                lm=lm, generation_config=SimpleNamespace(eos_token_id=None)), cfg.generation)
    if task in tasks.DATA_TASKS:
        return
    whole, room = has_encoder(facts), max_prompt_tokens(cfg, facts)
    if any(path is not None and sources.names_hub_dataset(path)
           for path in (cfg.prompts.path, cfg.prompts.eval.path)):
        return
    options: Any = {"seed": cfg.seed, "max_prompt_tokens": room, "whole": whole}
    prompts = prompt_set.load_prompts(cfg.prompts, tokenizer, **options)
    prompt_set.load_eval_prompts(cfg.prompts, tokenizer, training=prompts, items=None, **options)
    value = cfg.model.value
    for key, path in (("model.reference.path", cfg.model.reference.path),
                      ("model.value.path", value.path if value.kind == "model" else None)):
        if path is not None:
            other = model_config.read_lm(replace(cfg.model, path=path, revision=None, peft=None))
            refuse_short_reach(cfg, key, path, other, prompts.token_ids, pair=whole)


def try_first_step(cfg: TrainConfig, stop: StopFlag) -> list[str]:
    """Load everything that a run loads, and make a small first step, of which nothing is kept.

    Returns:
        lines for the user: sizes; for PPO the first prompt as the model gets it, two samples with
        score and KL, each reward and metric, and whether the reference agrees with the policy; the
        terms of the loss and the norm of the gradient; notes on flat rewards and zero gradients;
        seconds by phase and peak memory.

    Raises:
        PpocliError: whatever would end the run at its first step, with the same exit code.
        StopRequested: between two tokens or phases.
    """
    count = max(SAMPLES, cfg.ppo.n)  # at least one whole group
    small = config_yaml.with_values(cfg, {
        "ppo.num_rollouts": count, "ppo.mini_batch_size": count, "ppo.dynamic_sampling": None,
        "ppo.staleness": 0, "rollout.ahead": False})
    with open_backend(cfg.hardware) as backend:
        seed_generators(cfg.seed)
        clock = PhaseClock(backend.device)
        try:
            lines = list(_first_step(TaskSetup(small, backend, PythonObjects()), clock, stop))
        except torch.OutOfMemoryError as error:
            raise OutOfMemoryError(
                "Out of memory in a small first step.", where="hardware, model.path",
                fix="set model.gradient_checkpointing=true, generation.max_new_tokens or "
                    "prompts.max_length lower, or take a smaller model") from error
        seconds = (f"{name} {spent:.1f}" for name, spent in clock.seconds.items()
                   if name != "other")
        return [*lines, f"seconds: {', '.join(seconds)}",
                f"peak memory: {backend.peak_memory_mib():.0f} MiB"]


def _first_step(setup: TaskSetup, clock: PhaseClock, stop: StopFlag) -> Iterator[str]:
    task = build_task(setup)
    clock.mark("load")
    stop.check()
    yield _loaded(task)
    state, context = loop.initial_state(task), loop.context_of(task, 0, stop, clock)
    batch, names, scores = task.collect(state, context), task.terms, list[float]()
    if isinstance(task, PPOTask):
        names, scores = ("policy", "value"), batch.valid_scores
        yield from _sample_lines(task, batch, context)
        if not bool(batch.valid.any()):
            yield "gradient: not tried, no sample has a score"
            return
    plan = task.plan(state, batch)
    clock.mark("other")
    if not plan.groups:
        yield "gradient: not tried, no token counts"
        return
    group = plan.groups[0]
    result = optimize.optimize(task, replace(plan, groups=[group]), state, stop)
    clock.mark("optimize")
    if not result.first:
        raise DivergedError("The loss or the gradient of the first update is not finite.",
                            where="model.path", fix="check the model's weights and the scale of "
                            "the loss or the reward, or use hardware.precision=fp32")
    terms, = result.first.values()
    figures = [*(f"{name} loss {figure(terms[name], 4)}" for name in names),
               f"norm {figure(terms['grad_norm'], 4)}"]
    yield (f"gradient of the first {len(group.rows)} ({int(group.tokens.sum())} tokens): "
           f"{', '.join(figures)}")
    yield from _notes(terms, scores)


def _sample_lines(task: PPOTask, rollout: Rollout, context: StepContext) -> Iterator[str]:
    """The first prompt, samples with their scores, and whether the reference agrees."""
    session = task.session
    ids = rollout.prompts.tokens[0][rollout.prompts.mask[0]].tolist()
    yield f"first prompt as the model gets it ({len(ids)} tokens):"
    yield f"  {clean(session.tokenizer.decode(ids))}"
    for number, row in enumerate(task.sample_rows(rollout, 0)[:SAMPLES], start=1):
        yield (f"sample {number}: score {_short(row['score'])}, kl {figure(row['kl'], 4)}, "
               f"{row['response_tokens']} tokens, {'ended' if row['finished'] else 'did not end'}")
        yield f"  {clean(row['prompt'])} → {clean(row['response'])}"
    columns = {f"reward {name}": scores for name, scores in rollout.parts.items()
               if len(rollout.parts) > 1}
    if session.metric is not None:
        samples = Samples(rollout.sequences, rollout.logprobs, rollout.values, rollout.finished)
        metrics = session.metric.compute(policy_samples.in_steps(
            session.reward, policy_samples.request_of(
                session, context, rollout.prompts, samples, rollout.responses)))
        columns |= {f"metric {name}": values for name, values in metrics.items()}
        context.clock.mark("metric")
    yield from (f"{name}: {', '.join(map(_short, values))}" for name, values in columns.items())
    if tokens := int(rollout.response_mask.sum()) if rollout.has_reference else 0:
        kl = float(rollout.k1.double().sum()) / tokens
        verdict = "as it must be before training" if (
            abs(kl) <= KL_TOLERANCE[session.backend.precision]) else (
            "WRONG: before training it must be 0; do model.dtype and hardware.precision differ?")
        yield f"KL to the reference: {figure(kl, 6)} nats per token, {verdict}"


def _notes(terms: dict[str, float], scores: list[float]) -> Iterator[str]:
    """Notes on figures from which nothing can be learnt."""
    equal = len(scores) > 1 and max(scores) - min(scores) <= 1e-6 * abs(scores[0])
    if equal:
        yield (f"note: the scores of all {len(scores)} samples are equal ({scores[0]:g}): a run "
               "whose rewards are all equal learns nothing; does the reward read the response?")
    if terms["grad_norm"] < 1e-7:  # up to rounding
        yield "note: the gradient is 0, so that an update from this would change nothing: " + (
            "scores that are equal don't say which response is better" if equal else
            "look at which weights train and which tokens count")


def _loaded(task: Task) -> str:
    module, backend = task.trained.module, task.backend
    parameters = sum(p.numel() for p in module.parameters())
    trained = sum(p.numel() for p in optimizers.named_trainable(module).values())
    rows = f", {len(task.session.prompts)} prompts" if isinstance(task, PPOTask) else (
        "" if task.examples is None else f", {task.examples} examples")
    return (f"loaded: {parameters:,} parameters, {trained:,} trained{rows}, on {backend.device} "
            f"{backend.precision}")


def _short(value: float | None) -> str:
    return "none" if value is None else f"{value:.4g}"
