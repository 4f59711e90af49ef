"""PPO as a task: collecting rollouts, the loss of an update, and the figures of a step."""

import hashlib
import json
import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from ppocli.config import schema, schema_training, tasks
from ppocli.data.data_set import Examples, prompt_indices
from ppocli.models.loading.tokenizer import tokenizers_of
from ppocli.models.policy import CopyReference, follow
from ppocli.models.sharded_weights import ShardedCopy
from ppocli.ppo import rollout_sources, step, step_metrics
from ppocli.ppo.experience import POLICY, Experience, PPOState, after_step, first_rate
from ppocli.ppo.losses import PPOLoss
from ppocli.ppo.policy_samples import evaluate
from ppocli.ppo.rollout import Rollout
from ppocli.ppo.session import Session, build_session
from ppocli.rewards.scoring import check_invalid_share
from ppocli.runs.episode import Sample, transcript_turns
from ppocli.supervised import supervised_task
from ppocli.training import task
from ppocli.training.build_models import saved_policy
from ppocli.training.optimize import lr_factor
from ppocli.training.state import TrainState

log = logging.getLogger("ppocli")

EARLY_STOP = 1.5
"""times ``ppo.target_kl``: from there on the rest of a phase is left out"""
GROWTH = 1.5
"""power of the number of updates with which their KL grows: 1 if updates are noise, 2 if all go the
same way"""
NO_GRADIENT = 1e-7
"""norm of a gradient that is rounding: its updates change no weight, and their KL is rounding"""
LARGEST_CHANGE = 8.0
"""factor by which a steered learning rate changes after one step at most"""


class PPOTask(task.Task):
    """Proximal policy optimization (Schulman et al. 2017, arXiv 1707.06347) of a language model on
    a reward, with a KL penalty to a reference."""

    terms: tuple[str, ...] = PPOLoss._fields
    maxima = frozenset({"max_log_ratio"})
    remedy = ("lower ppo.optimizer.lr, raise ppo.init_kl_coef, check the reward's scale, or use "
              "hardware.precision=fp32")

    def __init__(self, session: Session) -> None:
        self.session = session
        self.cfg, self.backend = session.cfg, session.backend
        self.trained, self.passes = session.trained, session.passes
        self.judging = tokenizers_of(session.reward)
        self.saved = saved_policy(session.loaded, session.sampling, session.tokenizer)
        self.examples = len(session.prompts) if self.cfg.ppo.epochs else None
        self.samples_per_pass = self.cfg.ppo.n * len(session.prompts)
        self.chunk_size = session.chunk_size
        self.resume = PPOResume(self)
        self._value_schedule = tasks.value_scheduler(self.cfg.ppo)
        # a value function with a rate of its own keeps it
        roles = ("policy",) if self.cfg.ppo.optimizer.value_lr is not None else ("policy", "value")
        self._steered_roles = roles if tasks.steers_rate(self.cfg.ppo) else ()
        self._ahead: rollout_sources.Ahead | None = None

    def initial(self) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
        """As :class:`Task`."""
        coef = tasks.kl_coef(self.cfg.ppo)
        return asdict(PPOState(kl_coef=coef, init_kl_coef=coef,
                               rate=first_rate(self.cfg.ppo.optimizer.lr))), {}

    def collect(self, state: TrainState, context: task.StepContext) -> Rollout:
        """As :class:`Task`: sample, score, measure."""
        ppo, size = self.cfg.ppo, self.length.samples_per_step
        start = state.episodes + PPOState.from_json(state.task).left_out
        left = self.length.total_samples - state.episodes
        if ppo.dynamic_sampling or self.cfg.rollout.ahead or ppo.staleness or state.tensors:
            return self._collect_elsewhere(state, context, start, left)
        context.clock.mark("other")
        return step.collect_rollout(self.session, context, start, min(size, left))

    def _collect_elsewhere(self, state: TrainState, context: task.StepContext, start: int,
                           left: int) -> Rollout:
        """As :meth:`collect`, by a way of :mod:`ppocli.ppo.rollout_sources`, from sample ``start``
        on, of a run that still has ``left`` to learn from."""
        cfg, session, size = self.cfg, self.session, self.length.samples_per_step
        count = min(size, left)
        episodes = range(start, start + count)
        if cfg.ppo.dynamic_sampling is not None:
            return rollout_sources.collect_differing(session, context, start, count)
        if cfg.rollout.ahead:
            batch, self._ahead = rollout_sources.collect_ahead(
                session, context, self._ahead, episodes, start + min(2 * size, left))
            return batch
        return rollout_sources.collect_stale(
            session, context, state.tensors, episodes,
            start + min((1 + cfg.ppo.staleness) * size, left))

    def plan(self, state: TrainState, batch: Rollout) -> task.Plan:
        """As :class:`Task`: advantages, then ``ppo_epochs`` of reshuffled minibatches. Updates made
        = (critic_epochs + ppo_epochs) x ceil(samples / mini_batch_size), less skipped ones and less
        what ``target_kl`` cuts off. A RewardError where too few samples have a valid score."""
        if invalid := int((~batch.valid).sum()):
            check_invalid_share(invalid, len(batch),
                                [one.error for one in batch.extras.episodes if one.error])
        before, size = PPOState.from_json(state.task), self.length.samples_per_step
        left = max(self.length.total_samples - state.episodes - size, 0)
        experience = step.to_experience(
            batch, before, self.cfg, progress=state.step / max(state.step + -(-left // size), 1),
            pretrains=before.pretrained_at is None
            and state.step < self.cfg.ppo.value_pretrain_steps)
        plan = step.plan_updates(self.session, experience, state.step)
        if self.session.examples is not None:
            plan = with_examples(self.session, plan, before.mixed_in)
        return replace(plan, rate_factors=dict.fromkeys(self._steered_roles, before.rate))

    def loss(self, atoms: Experience, rows: torch.Tensor, weights: torch.Tensor,
             group: task.UpdateGroup) -> task.LossTerms:
        """As :class:`Task`: of the policy as it is now, or of examples of ``ppo.ptx.data``."""
        examples, count = atoms.extras.examples, len(atoms.sequences)
        if examples is not None and int(rows[0]) >= count:
            return self._loss_of_examples(examples, rows - count, weights)
        of_policy, tokens = step.loss(self.session, atoms, rows, weights, group)
        return task.LossTerms(of_policy.total, torch.stack(of_policy).detach(), tokens)

    def _loss_of_examples(self, examples: Examples, rows: torch.Tensor, weights: torch.Tensor
                          ) -> task.LossTerms:
        nll, tokens = examples_loss(self.session, examples, rows, weights)
        total, zero = self.cfg.ppo.ptx.coef * nll, nll.new_zeros(())
        values = [total, *[zero] * (len(PPOLoss._fields) - 2), nll]
        return task.LossTerms(total, torch.stack(values).detach(), tokens)

    def judge(self, terms: dict[str, float]) -> task.Verdict:
        """As :class:`Task`: ``ppo.target_kl`` ends the phase, ``ppo.ratio_threshold`` skips."""
        ppo = self.cfg.ppo
        if not all(map(math.isfinite, terms.values())):
            return task.Verdict.NONFINITE
        if ppo.target_kl is not None and terms["approx_kl"] > EARLY_STOP * ppo.target_kl:
            return task.Verdict.STOP
        if ppo.ratio_threshold is None or terms["ratio"] <= ppo.ratio_threshold:
            return task.Verdict.STEP
        _warn_of_ratio(terms, ppo.ratio_threshold)
        return task.Verdict.SKIP

    def finish(self, state: TrainState, batch: Rollout, plan: task.Plan,
               result: task.OptimizeResult) -> task.Finished:
        """As :class:`Task`: the KL coefficient follows its controller, bad signs are counted."""
        cfg, before, extras = self.cfg, PPOState.from_json(state.task), batch.extras
        after = after_step(before, batch, plan.atoms, cfg, state.step + 1)
        row = step_metrics.step_figures(batch, before.kl_coef, result, plan.atoms, cfg)
        if cfg.ppo.step_kl is not None:
            after, row["policy/step_kl"] = self._steered(state, after, plan, result)
        tokens = int(batch.sequences.mask.sum())
        if extras.sampled or extras.waiting or state.tensors or self.session.examples is not None:
            after, tokens = self._count_more(state, after, batch, tokens)
        after, warnings = step_metrics.watch(self.session, batch, after, row, state)
        if gap := step_metrics.decoding_gap(self.session, result):
            after, warnings = replace(after, decoding_differs=True), [*warnings, gap]
            self.session.from_decode = False
        return task.Finished(row, asdict(after), tensors=extras.waiting, warnings=warnings,
                             tokens={"rollout": tokens})

    def _count_more(self, state: TrainState, after: PPOState, batch: Rollout, tokens: int
                    ) -> tuple[PPOState, int]:
        """The state that counts samples and examples beyond the batch, and the tokens sampled in
        this step; the batch has ``tokens``."""
        extras = batch.extras
        if self.session.examples is not None:
            after = replace(after, mixed_in=after.mixed_in + examples_of(self.cfg.ppo, len(batch)))
        if extras.sampled:
            left_out = after.left_out + extras.sampled - len(batch)
            return replace(after, left_out=left_out), extras.sampled_tokens
        # sampled now for later steps, or before for this one
        return after, (tokens + rollout_sources.response_tokens(extras.waiting)
                       - rollout_sources.response_tokens(state.tensors))

    def _steered(self, state: TrainState, after: PPOState, plan: task.Plan,
                 result: task.OptimizeResult) -> tuple[PPOState, float]:
        """The state with the factor on the learning rate of the next step, which ``ppo.step_kl``
        steers, and the KL of this step's updates."""
        ppo = self.cfg.ppo
        moved = kl_of_updates(result.made.get(POLICY, ()), plan.atoms.mean_loss_tokens)
        if not self._steered_roles or result.terms["grad_norm"] <= NO_GRADIENT:
            return after, moved
        shape = lr_factor(ppo.scheduler, state.updates, self.length.total_updates(state))
        rate = next_rate(after.rate, moved, (ppo.step_kl or 0.0) * shape**2)
        return replace(after, rate=rate), moved

    def on_step_end(self, state: TrainState) -> None:
        """As :class:`Task`: a reference that follows the policy does so now."""
        cfg, reference = self.cfg.model.reference, self.session.reference
        if (isinstance(reference, CopyReference) and cfg.sync_every is not None
                and state.step > 0 and state.step % cfg.sync_every == 0):
            follow(reference, self.session.policy.lm, cfg.sync_alpha)

    def evaluate(self, context: task.StepContext) -> task.Evaluation:
        """As :class:`Task`: responses to the evaluation prompts, scored."""
        return evaluate(self.session, context)

    def modules(self) -> dict[str, torch.nn.Module]:
        """As :class:`Task`: the value function's, and a reference that follows the policy."""
        policy = self.session.policy
        modules: dict[str, Any] = {"value_head": policy.value_head,
                                   "value_trunk": policy.value_trunk}
        if self.cfg.model.reference.sync_every is not None:
            modules["reference"] = getattr(self.session.reference, "lm", None)
        return {name: module for name, module in modules.items() if module is not None}

    def schedule(self, role: str) -> schema_training.SchedulerConfig:
        """As :class:`Task`: ``ppo.value_scheduler`` for the critic."""
        return self._value_schedule if role == "value" else self.cfg.ppo.scheduler

    def preview(self, batch: Rollout) -> list[Sample]:
        """As :class:`Task`."""
        texts: list[Any] = batch.responses
        if batch.extras.episodes:
            texts = [transcript_turns(step_metrics.episode_row(one))
                     for one in batch.extras.episodes]
        return list(zip(batch.prompts.texts, texts, batch.shown_scores, strict=True))[:4]

    def sample_rows(self, batch: Rollout, step: int) -> list[dict[str, Any]]:
        """As :class:`Task`."""
        return step_metrics.rollout_samples(batch, step, self.cfg)

    def summary(self, state: TrainState) -> dict[str, Any]:
        """As :class:`Task`."""
        return {"kl_coef": PPOState.from_json(state.task).kl_coef}

    def close(self) -> None:
        """As :class:`Task`: what DeepSpeed has built around the reference is torn down."""
        if isinstance(reference := self.session.reference, ShardedCopy):
            reference.engine.destroy()


# Supervised examples beside the samples (``ppo.ptx``): texts whose likelihood is a term of the
# policy's loss, so that it doesn't forget them ("PPO-ptx" of InstructGPT, Ouyang et al. 2022, arXiv
# 2203.02155, eq. 2)

def with_examples(session: Session, plan: task.Plan, first: int) -> task.Plan:
    """The same updates, each that trains the policy with the next examples of the stream.

    Which those are is a function of the seed and of the updates that were planned before: a resumed
    run goes on with the same, and an update that is skipped uses its own up.

    Args:
        first: place in the stream, counted from its start.

    Returns:
        the plan with the examples of all updates: atoms after the B samples are these examples,
        each trained token of which has the same weight.
    """
    data, ppo, updates = session.examples, session.cfg.ppo, list(plan.groups)
    experience: Experience = plan.atoms
    training = [i for i, group in enumerate(updates) if group.part == POLICY]
    if data is None or not ppo.ptx.coef or not training:
        return plan
    size = _of_an_update(ppo)
    examples = data.rows(prompt_indices(first, size * len(training), n=len(data),
                                    seed=session.cfg.seed, shuffle=ppo.ptx.data.shuffle))
    places = torch.arange(len(examples)) + len(experience.sequences)
    columns = zip(*(column.split(size) for column in (
        places, supervised_task.lengths_of(examples), supervised_task.counts_of(examples))),
        strict=True)
    for i, (rows, lengths, counts) in zip(training, columns, strict=True):
        group = updates[i]
        updates[i] = replace(
            group, rows=torch.cat([rows, group.rows]), tokens=torch.cat([lengths, group.tokens]),
            counts=torch.cat([counts, group.counts]),
            weights=torch.cat([torch.full((size,), 1.0 / int(counts.sum())), group.weights]),
            kinds=(torch.arange(size + len(group.rows)) >= size).long())
    extras = replace(experience.extras, examples=examples)
    return replace(plan, atoms=replace(experience, extras=extras), groups=updates)


def examples_of(ppo: schema.PPOConfig, samples: int) -> int:
    """How far a step of so many samples takes the stream on, whichever of its updates are made."""
    return ppo.ppo_epochs * math.ceil(samples / ppo.mini_batch_size) * _of_an_update(ppo)


def _of_an_update(ppo: schema.PPOConfig) -> int:
    return ppo.ptx.mini_batch_size or ppo.mini_batch_size


def examples_loss(session: Session, examples: Examples, rows: torch.Tensor, weights: torch.Tensor
                  ) -> tuple[torch.Tensor, int]:
    """``-sum w log p`` over the trained tokens of some examples at temperature 1, and how many
    tokens were computed.

    Args:
        rows: [a] places of the examples.
        weights: [a] fp32 weight of each of their tokens.
    """
    samples = supervised_task.sequences_of(examples, rows, session.loaded.decoder_start)
    # reducers on several ranks want a gradient of every weight from every pass: ZeRO 3 would add to
    # what is left of the update before
    several = session.backend.ranks.world > 1 or session.backend.zero_stage > 0
    return supervised_task.weighted_nll(
        session.trained.engine, samples, weights, session.backend.device,
        pack=session.packs and session.cfg.ppo.ptx.data.packing, want_values=several)


def kl_of_updates(updates: Sequence[Mapping[str, float]], mean_tokens: float) -> float:
    """The KL between the policies before and after a step's updates, in nats per response, from
    what each measured before it was made: after k of K updates it is ``(k/K)^1.5`` of the whole.
    The first update's own is taken off: it is 0 unless the samples are another policy's.

    An update's KL is that of ``ratio - 1 - log ratio`` over the samples of the old policy, which is
    never negative and which tokens that have all but vanished don't dominate.

    Args:
        updates: terms of each update, means over tokens.
        mean_tokens: trained tokens of a response. What a reward can gain is bounded by the KL of a
            whole response, so that long responses move less per token.

    Returns:
        0, which stands for "unknown", with fewer than two updates.
    """
    kls, count = [terms["approx_kl"] + terms["ratio"] - 1.0 for terms in updates], len(updates)
    if count < 2:
        return 0.0
    share = math.fsum((made / count) ** GROWTH for made in range(count))
    return mean_tokens * (max(math.fsum(kl - kls[0] for kl in kls), 0.0) / share)


def next_rate(rate: float, kl: float, target: float) -> float:
    """The factor on the learning rate in the next step, ``rate * sqrt(target / kl)``: a KL goes
    with the square of the step that causes it. It changes by 8 at most.

    Args:
        rate: the factor in this step.
        kl: of this step, as of :func:`kl_of_updates`.
        target: what it should have been; where either is 0 the rate stays.
    """
    if not (0.0 < kl < math.inf and target > 0.0):
        return rate
    return rate * min(max(math.sqrt(target / kl), 1.0 / LARGEST_CHANGE), LARGEST_CHANGE)


@dataclass(frozen=True, slots=True)
class PPOResume(task.Resume):
    """What PPO compares and changes when a run is resumed."""

    task: PPOTask

    def adopt(self, saved: TrainState, fresh: TrainState) -> TrainState:
        """As :class:`Resume`: another ``ppo.init_kl_coef`` starts the coefficient anew."""
        old, new = PPOState.from_json(saved.task), PPOState.from_json(fresh.task)
        if old.decoding_differs and self.task.cfg.ppo.logprobs_from != "decode":
            self.task.session.from_decode = False
        if old.init_kl_coef != new.init_kl_coef:
            old = replace(old, kl_coef=new.init_kl_coef, init_kl_coef=new.init_kl_coef)
        return replace(saved, task=asdict(old))

    def digests(self) -> dict[str, str]:
        """As :class:`Resume`: of the prompts and of the reference's weights."""
        session = self.task.session
        digests = {"prompts": session.prompts.digest(),
                   "evaluation prompts": session.eval_prompts.digest(),
                   "ppo.data": None if session.examples is None else session.examples.digest(),
                   "reference model": session.reference_digest()}
        return {name: digest for name, digest in digests.items() if digest is not None}

    def eval_fingerprint(self) -> str:
        """As :class:`Resume`; under another, figures are not comparable with the best so far."""
        cfg = self.task.cfg
        reward = asdict(cfg.reward) | {name: getattr(schema.RewardConfig(), name) for name in (
            "timeout", "retries", "overlap", "ranks")}  # how it is called
        env = {name: value for name, value in asdict(cfg.env).items()
               if name not in ("timeout", "retries", "workers")}
        judge = [reward, asdict(cfg.generation), cfg.checkpoint.metric, cfg.prompts.eval.repeat,
                 cfg.env.fn and env, *self.task.session.reward_model_digests()]
        return hashlib.sha256(json.dumps(judge, sort_keys=True, default=str).encode()).hexdigest()

    def kept_step(self, state: TrainState) -> int | None:
        """As :class:`Resume`: the end of value pretraining, from which other runs can start."""
        return PPOState.from_json(state.task).pretrained_at


def _warn_of_ratio(terms: dict[str, float], threshold: float) -> None:
    """Warn of an update that ``ppo.ratio_threshold`` refuses."""
    ratio = next(text for digits in range(3, 18)
                 if float(text := f"{terms['ratio']:.{digits}g}") > threshold)
    log.warning("Mean ratio %s exceeds ppo.ratio_threshold=%g (log-ratios of up to %.3g): the "
                "policy has moved too far from the one that sampled; the update is skipped.",
                ratio, threshold, terms["max_log_ratio"])


def build_task(setup: task.TaskSetup) -> PPOTask:
    """The task that ``ppocli train`` trains where ``task.fn`` names no other.

    Raises:
        RewardError, InputError, ConfigError: each naming the key and the fix.
    """
    return PPOTask(build_session(setup.cfg, setup.backend, setup.objects))
