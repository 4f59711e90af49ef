"""A run's first step in small, up to the gradient and no further: of PPO everything that a step
does with samples, on two of them; of any other training its first update.

What a configuration can't tell shows here within seconds: how a prompt is rendered, what the reward
makes of real responses, whether the reference agrees with the policy, whether gradients are finite.
"""

import math
from typing import Any

import torch

from ppocli.config import tasks
from ppocli.config.schema import TrainConfig
from ppocli.errors import DivergedError, OutOfMemoryError
from ppocli.parallel.backend import Backend, open_backend
from ppocli.parallel.stop import StopFlag
from ppocli.sampling.samples import Samples
from ppocli.tasks import build_task
from ppocli.tasks.ppo import figures, records, reward_calls, step
from ppocli.tasks.ppo.session import Session, build_session
from ppocli.tasks.ppo.task import PPOTask
from ppocli.training import loop, optimize, optimizers
from ppocli.training.state import PhaseClock, seed_generators
from ppocli.training.task import Plan, PythonObjects, StepContext, Task, TaskSetup

SAMPLES = 2
"""how many of the first step's samples are drawn"""
KL_TOLERANCE = {"fp32": 1e-3, "bf16": 5e-2}
"""nats per token by which rounding may part a policy from its copy"""


def rehearse(cfg: TrainConfig, stop: StopFlag) -> dict[str, Any]:
    """Load everything that a run loads, and take it through its first step without an update.

    Returns:
        what came of it, plain JSON types. Always ``device``, ``precision``, ``parameters``,
        ``trainable``, ``terms`` (of the loss, and the norm of the gradient), ``seconds`` by phase
        and ``peak_memory_mib``, the device's or the process's. Of other trainings than PPO
        ``examples`` (of a reward model pairs) to train on, None where the task doesn't tell, and
        how many ``rows`` and ``tokens`` the first update has. Of PPO ``prompts``, the first
        ``prompt`` as the model gets it, special tokens included, and its ``prompt_tokens``;
        ``samples`` with prompt, response, score, kl, response_tokens and finished of each;
        ``parts``, the scores of each reward by sample, and ``metrics`` likewise;
        ``kl_per_token``, nats from policy to reference, which are one model before training (None
        without a reference), and whether it ``agrees`` with that, up to rounding. There
        ``terms`` is None if no sample has a score. ``notes`` say what of it trains nothing.

    Raises:
        PpocliError: whatever would end the run at its first step, with the same exit code.
        StopRequested: between two tokens or phases.
    """
    with open_backend(cfg.hardware) as backend:
        seed_generators(cfg.seed)
        clock = PhaseClock(backend.device)
        rehearse_kind = _ppo if tasks.task_name(cfg) == "ppo" else _first_update
        return rehearse_kind(cfg, backend, clock, stop)


def _first_update(cfg: TrainConfig, backend: Backend, clock: PhaseClock, stop: StopFlag
                  ) -> dict[str, Any]:
    task = build_task(TaskSetup(cfg, backend, PythonObjects()))
    clock.mark("load")
    stop.check()
    state = loop.initial_state(task)
    plan = task.plan(state, task.collect(state, StepContext(stop, clock, task.progress(0))))
    group = plan.groups[0]
    terms = _gradient(task, plan, "check the model's weights, or use hardware.precision=fp32")
    clock.mark("optimize")
    return _told(backend, task.trained.module, clock, examples=task.examples,
                 rows=len(group.rows), tokens=int(group.tokens.sum()), terms=terms,
                 notes=_notes(terms, []))


def _ppo(cfg: TrainConfig, backend: Backend, clock: PhaseClock, stop: StopFlag) -> dict[str, Any]:
    try:
        session = build_session(cfg, backend, PythonObjects())
        return _first_samples(session, session.context(stop, clock))
    except torch.OutOfMemoryError as error:
        raise OutOfMemoryError(
            f"Out of memory with {SAMPLES} samples.", where="hardware, model.path",
            fix="set model.gradient_checkpointing=true, generation.max_new_tokens or "
                "prompts.max_length lower, or take a smaller model") from error


def _first_samples(session: Session, context: StepContext) -> dict[str, Any]:
    context.clock.mark("load")
    context.stop.check()
    rollout = step.collect_rollout(session, context, 0, SAMPLES)
    prompts = rollout.prompts
    metrics: dict[str, list[float]] = {}
    if session.metric is not None:
        samples = Samples(rollout.sequences, rollout.logprobs, rollout.values, rollout.finished)
        metrics = session.metric.compute(reward_calls.in_steps(
            session.reward, reward_calls.request_of(
                session, context, prompts, samples, rollout.responses)))
        context.clock.mark("metric")
    terms = _ppo_gradient(PPOTask(session), rollout)
    context.clock.mark("optimize")
    tokens = int(rollout.response_mask.sum()) if rollout.has_reference else 0
    kl = float(rollout.k1.double().sum()) / tokens if tokens else None
    ids = prompts.tokens[0][prompts.mask[0]].tolist()
    shown = ("prompt", "response", "score", "kl", "response_tokens", "finished")
    return _told(
        session.backend, session.policy, context.clock, prompts=len(session.prompts),
        prompt=session.tokenizer.decode(ids), prompt_tokens=len(ids),
        samples=[{name: row[name] for name in shown}
                 for row in figures.rollout_samples(rollout, 0, session.cfg)],
        parts=dict(rollout.parts), metrics=metrics, kl_per_token=kl, terms=terms,
        notes=_notes(terms, rollout.valid_scores)) | {
            "agrees": kl is None or abs(kl) <= KL_TOLERANCE[session.backend.precision]}


def _notes(terms: dict[str, float] | None, scores: list[float]) -> list[str]:
    """What such figures say of the run to come, where nothing could be learnt from them."""
    equal = len(scores) > 1 and max(scores) - min(scores) <= 1e-6 * abs(scores[0])
    notes = [] if not equal else [
        f"the scores of all {len(scores)} samples are equal ({scores[0]:g}): a run whose rewards "
        "are all equal learns nothing; does the reward read the response?"]
    if terms is not None and terms["grad_norm"] < 1e-7:  # up to rounding
        notes.append("the gradient is 0, so that an update from this would change nothing: " + (
            "scores that are equal don't say which response is better" if equal else
            "look at which weights train and which tokens count"))
    return notes


def _told(backend: Backend, module: torch.nn.Module, clock: PhaseClock, **found: Any
          ) -> dict[str, Any]:
    """What was found, between what was loaded and what it has cost."""
    return {"device": str(backend.device), "precision": backend.precision,
            "parameters": sum(p.numel() for p in module.parameters()),
            "trainable": sum(p.numel() for p in optimizers.named_trainable(module).values()),
            **found,
            "seconds": dict(clock.seconds), "peak_memory_mib": backend.peak_memory_mib()}


def _ppo_gradient(task: PPOTask, rollout: records.Rollout) -> dict[str, float] | None:
    if not bool(rollout.valid.any()):
        return None
    state = records.PPOState.from_json(task.initial()[0])
    learnt = step.to_experience(rollout, state, task.cfg)
    whole = step.update_of(task.session, learnt, torch.arange(len(rollout)))
    plan = step.plan_of(task.session, learnt, [whole], 0)
    return _gradient(task, plan, "check the model's weights and the reward's scale, or use "
                     "hardware.precision=fp32")


def _gradient(task: Task, plan: Plan, fix: str) -> dict[str, float]:
    """The loss terms and the gradient's norm of the first update, which are finite.

    Raises:
        DivergedError: they aren't; ``fix`` says what to do then.
    """
    terms = optimize.probe_gradient(task, plan)
    if wrong := [name for name, value in terms.items() if not math.isfinite(value)]:
        raise DivergedError(f"Before any update {', '.join(wrong)} is not finite.",
                            where="model.path", fix=fix)
    return terms
