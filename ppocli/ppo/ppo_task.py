"""PPO as a task: collecting rollouts, the loss of an update, and the figures of a step."""

import hashlib
import json
import logging
import math
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from ppocli.config import algorithm, schema, schema_training
from ppocli.models.loading import chat_template
from ppocli.models.policy import CopyReference, follow
from ppocli.models.sharded_weights import ShardedCopy
from ppocli.ppo import ptx, records, rollout_sources, step, step_metrics, step_size
from ppocli.ppo.experience import after_step
from ppocli.ppo.losses import PPOLoss
from ppocli.ppo.policy_evaluation import evaluate
from ppocli.ppo.session import Session, build_session
from ppocli.rewards.scoring import check_invalid_share
from ppocli.runs.episode import Sample, transcript_turns
from ppocli.training import task
from ppocli.training.build_models import saved_policy
from ppocli.training.state import TrainState
from ppocli.training.updates import lr_factor

log = logging.getLogger("ppocli")

EARLY_STOP = 1.5
"""times ``ppo.target_kl``: from there on the rest of a phase is left out"""


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
        self.judging = chat_template.tokenizers_of(session.reward)
        self.saved = saved_policy(session.loaded, session.sampling, session.tokenizer)
        self.examples = len(session.prompts) if self.cfg.ppo.epochs else None
        self.samples_per_pass = self.cfg.ppo.n * len(session.prompts)
        self.chunk_size = session.chunk_size
        self.resume = PPOResume(self)
        if session.examples is not None:
            self.terms = (*self.terms, "ptx")
        self._ahead: rollout_sources.Ahead | None = None

    def initial(self) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
        """As :class:`Task`."""
        coef = self.cfg.ppo.init_kl_coef
        return records.PPOState(kl_coef=coef, init_kl_coef=coef).to_json(), {}

    def collect(self, state: TrainState, context: task.StepContext) -> records.Rollout:
        """As :class:`Task`: sample, score, measure."""
        cfg, session, size = self.cfg, self.session, self.length.samples_per_step
        start = state.episodes + records.PPOState.from_json(state.task).left_out
        left = self.length.total_samples - state.episodes
        count = min(size, left)
        episodes = range(start, start + count)
        if cfg.ppo.dynamic_sampling is not None:
            return rollout_sources.collect_differing(session, context, start, count)
        if cfg.rollout.ahead:
            batch, self._ahead = rollout_sources.collect_ahead(
                session, context, self._ahead, episodes, start + min(2 * size, left))
            return batch
        if cfg.ppo.staleness or state.tensors:
            return rollout_sources.collect_stale(
                session, context, state.tensors, episodes,
                start + min((1 + cfg.ppo.staleness) * size, left))
        context.clock.mark("other")
        return step.collect_rollout(session, context, start, count)

    def share_done(self, state: TrainState) -> float:
        """0 in the first step of the run, 1 in the last."""
        size = self.length.samples_per_step
        left = max(self.length.total_samples - state.episodes - size, 0)
        return state.step / max(state.step + -(-left // size), 1)

    def plan(self, state: TrainState, batch: records.Rollout) -> task.Plan:
        """As :class:`Task`: advantages, then ``ppo_epochs`` of reshuffled minibatches.

        Updates made = (critic_epochs + ppo_epochs) x ceil(samples / mini_batch_size), less skipped
        ones and less what ``target_kl`` cuts off.

        Raises:
            RewardError: too few samples have a valid score.
        """
        if invalid := int((~batch.valid).sum()):
            check_invalid_share(invalid, len(batch),
                                [one.error for one in batch.extras.episodes if one.error])
        ppo_state = records.PPOState.from_json(state.task)
        pretrains = (ppo_state.pretrained_at is None
                     and state.step < self.cfg.ppo.value_pretrain_steps)
        experience = step.to_experience(
            batch, ppo_state, self.cfg, progress=self.share_done(state), pretrains=pretrains)
        plan = step.plan_updates(self.session, experience, state.step, ppo_state.mixed_in)
        if not algorithm.steers_rate(self.cfg.ppo):
            return plan
        # a value function with a rate of its own keeps it
        roles = ("policy",) if self.cfg.ppo.optimizer.value_lr is not None else ("policy", "value")
        return replace(plan, rate_factors=dict.fromkeys(roles, ppo_state.rate))

    def loss(self, atoms: records.Experience, rows: torch.Tensor, weights: torch.Tensor,
             group: task.UpdateGroup) -> task.LossTerms:
        """As :class:`Task`; :func:`ppocli.ppo.losses.ppo_loss` of the policy of this moment, or
        ``ppo.ptx.coef`` times the negative log-likelihood of examples."""
        examples, count = atoms.extras.examples, len(atoms)
        if examples is not None and int(rows[0]) >= count:
            nll, tokens = ptx.examples_loss(self.session, examples, rows - count, weights)
            total = self.cfg.ppo.ptx.coef * nll
            terms = {"total": total, "ptx": nll}
        else:
            of_policy, tokens = step.loss(self.session, atoms, rows, weights, group)
            total = of_policy.total
            terms = of_policy._asdict()
        zero = total.new_zeros(())
        return task.LossTerms(
            total, torch.stack([terms.get(name, zero).detach() for name in self.terms]), tokens)

    def judge(self, terms: dict[str, float]) -> task.Verdict:
        """As :class:`Task`: ``ppo.target_kl`` ends the phase, ``ppo.ratio_threshold`` skips."""
        ppo = self.cfg.ppo
        if not all(map(math.isfinite, terms.values())):
            return task.Verdict.NONFINITE
        if ppo.target_kl is not None and terms["approx_kl"] > EARLY_STOP * ppo.target_kl:
            return task.Verdict.STOP
        if ppo.ratio_threshold is None or terms["ratio"] <= ppo.ratio_threshold:
            return task.Verdict.STEP
        ratio = next(text for digits in range(3, 18)
                     if float(text := f"{terms['ratio']:.{digits}g}") > ppo.ratio_threshold)
        log.warning("Mean ratio %s exceeds ppo.ratio_threshold=%g (log-ratios of up to %.3g): the "
                    "policy has moved too far from the one that sampled; the update is skipped.",
                    ratio, ppo.ratio_threshold, terms["max_log_ratio"])
        return task.Verdict.SKIP

    def finish(self, state: TrainState, batch: records.Rollout, plan: task.Plan,
               result: task.OptimizeResult) -> task.Finished:
        """As :class:`Task`: the KL coefficient follows its controller, signs of a run going wrong
        are counted."""
        cfg, before = self.cfg, records.PPOState.from_json(state.task)
        after = after_step(before, batch, plan.atoms, cfg, state.step + 1)
        if cfg.ppo.step_kl is not None and algorithm.steers_rate(cfg.ppo):
            shape = lr_factor(cfg.ppo.scheduler, state.updates,
                              self.length.total_updates(cfg, state))
            moved = step_size.kl_of_updates(result.made.get(records.POLICY, ()),
                                            plan.atoms.mean_loss_tokens)
            after = replace(after, rate=step_size.next_rate(
                before.rate, moved, cfg.ppo.step_kl * shape**2))
        if self.session.examples is not None:
            after = replace(after, mixed_in=before.mixed_in + ptx.examples_of(cfg.ppo, len(batch)))
        extras, tokens = batch.extras, int(batch.sequences.mask.sum())
        if extras.waiting or state.tensors:  # sampled now for later steps, or before for this one
            tokens += (rollout_sources.response_tokens(extras.waiting)
                       - rollout_sources.response_tokens(state.tensors))
        if extras.sampled:
            tokens = extras.sampled_tokens
            after = replace(after, left_out=before.left_out + extras.sampled - len(batch))
        row = step_metrics.step_figures(batch, before.kl_coef, result, plan.atoms, cfg)
        after, warnings = step_metrics.watch(self.session, batch, after, row, state)
        if gap := step_metrics.decoding_gap(self.session, result):
            after, warnings = replace(after, decoding_differs=True), [*warnings, gap]
            self.session.decoding_differs = True
        return task.Finished(row, after.to_json(), tensors=extras.waiting, warnings=warnings,
                             tokens={"rollout": tokens})

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
        return (algorithm.value_scheduler(self.cfg.ppo) if role == "value"
                else self.cfg.ppo.scheduler)

    def preview(self, batch: records.Rollout) -> list[Sample]:
        """As :class:`Task`."""
        texts: list[Any] = batch.responses
        if batch.extras.episodes:
            texts = [transcript_turns(step_metrics.episode_row(one))
                     for one in batch.extras.episodes]
        return list(zip(batch.prompts.texts, texts, batch.shown_scores, strict=True))[:4]

    def sample_rows(self, batch: records.Rollout, step: int) -> list[dict[str, Any]]:
        """As :class:`Task`."""
        return step_metrics.rollout_samples(batch, step, self.cfg)

    def summary(self, state: TrainState) -> dict[str, Any]:
        """As :class:`Task`."""
        return {"kl_coef": records.PPOState.from_json(state.task).kl_coef}

    def close(self) -> None:
        """As :class:`Task`: what DeepSpeed has built around the reference is torn down."""
        if isinstance(reference := self.session.reference, ShardedCopy):
            reference.engine.destroy()


@dataclass(frozen=True, slots=True)
class PPOResume(task.Resume):
    """What PPO compares and changes when a run is resumed."""

    task: PPOTask

    def adopt(self, saved: TrainState, fresh: TrainState) -> TrainState:
        """As :class:`Resume`: another ``ppo.init_kl_coef`` starts the coefficient anew."""
        old, new = records.PPOState.from_json(saved.task), records.PPOState.from_json(fresh.task)
        self.task.session.decoding_differs = old.decoding_differs
        if old.init_kl_coef != new.init_kl_coef:
            old = replace(old, kl_coef=new.init_kl_coef, init_kl_coef=new.init_kl_coef)
        return replace(saved, task=old.to_json())

    def digests(self) -> dict[str, str]:
        """As :class:`Resume`: of the prompts and of the reference's weights."""
        session = self.task.session
        digests = {"prompts": session.prompts.digest(),
                   "evaluation prompts": session.eval_prompts.digest(),
                   "ppo.ptx.data": None if session.examples is None else session.examples.digest(),
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
        return records.PPOState.from_json(state.task).pretrained_at


def build_task(setup: task.TaskSetup) -> PPOTask:
    """The task that ``ppocli train`` trains where ``task.fn`` names no other.

    Raises:
        RewardError, InputError, ConfigError: each naming the key and the fix.
    """
    return PPOTask(build_session(setup.cfg, setup.backend, setup.objects))
