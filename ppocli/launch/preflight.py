"""``--dry-run``: the first step in small, of which nothing is kept.

Within seconds a dry run shows how a prompt is rendered, how the reward scores real responses,
whether the reference agrees with the policy, and whether gradients are finite.
"""

from collections.abc import Iterator
from dataclasses import replace

import torch

from ppocli.config import config_yaml
from ppocli.config.schema import TrainConfig
from ppocli.config.text import clean, figure
from ppocli.distributed.backend import open_backend
from ppocli.distributed.ranks import StopFlag
from ppocli.errors import DivergedError, OutOfMemoryError
from ppocli.ppo import policy_samples
from ppocli.ppo.ppo_task import PPOTask
from ppocli.ppo.rollout import Rollout
from ppocli.sampling.samples import Samples
from ppocli.training import loop, optimize, optimizers
from ppocli.training.state import PhaseClock, seed_generators
from ppocli.training.task import PythonObjects, StepContext, Task, TaskSetup, build_task

SAMPLES = 2
"""how many of the first step's samples are drawn"""
KL_TOLERANCE = {"fp32": 1e-3, "bf16": 5e-2}
"""nats per token by which rounding may part a policy from its copy"""


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
