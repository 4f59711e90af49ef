"""PPO as a task: collecting rollouts, the loss of an update, and the figures of a step."""

import hashlib
import json
import logging
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file

from ppocli.config import algorithm, sampling, schema
from ppocli.episode import Sample, spoken
from ppocli.models import head, layer_stack, layout, passes
from ppocli.models.reference import CopyReference, follow
from ppocli.parallel.backend import to_device
from ppocli.parallel.stop import StopFlag
from ppocli.ppo.losses import PPOLoss, ppo_loss, token_weights
from ppocli.rewards.calls import check_invalid_share
from ppocli.storage.run_logs import JsonlWriter
from ppocli.tasks.building import saved_policy
from ppocli.tasks.ppo import collecting, figures, ptx, records, rollout
from ppocli.tasks.ppo.evaluate import evaluate, reference_responses
from ppocli.tasks.ppo.experience import after_step, loss_options, to_experience
from ppocli.tasks.ppo.session import Session, build_session
from ppocli.training import optimizers, task
from ppocli.training.clock import PhaseClock
from ppocli.training.state import TrainState
from ppocli.zero.sharded_models import ShardedCopy

log = logging.getLogger("ppocli")

EARLY_STOP = 1.5
"""times ``ppo.target_kl``: from there on the rest of a phase is left out"""


class PPOTask(task.Task):
    """Proximal policy optimization (Schulman et al. 2017, arXiv 1707.06347) of a language model on
    a reward, with a KL penalty to a reference."""

    terms = tuple(f.name for f in fields(PPOLoss))
    maxima = frozenset({"max_log_ratio"})

    def __init__(self, session: Session) -> None:
        self.session = session
        self.cfg, self.backend = session.cfg, session.backend
        self.trained, self.passes = session.trained, session.passes
        self.saved = saved_policy(session.loaded, session.sampling, session.tokenizer)
        self.examples = len(session.prompts) if self.cfg.ppo.epochs else None
        if session.examples is not None:
            self.terms = (*self.terms, "ptx")
        self._ref_responses: list[str] | None = None
        self._ahead: collecting.Ahead | None = None

    def initial(self) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
        """As :class:`Task`."""
        coef = self.cfg.ppo.init_kl_coef
        return records.PPOState(kl_coef=coef, init_kl_coef=coef).to_json(), {}

    def chunks(self, state: TrainState) -> int:
        """As :class:`Task`."""
        return -(-self._count(state) // self.session.chunk_size)

    def _count(self, state: TrainState, steps: int = 1) -> int:
        """Samples of so many steps, or as many as are left."""
        return min(steps * self.samples_per_step, self.total_samples() - state.episodes)

    def collect(self, state: TrainState, stop: StopFlag, clock: PhaseClock) -> records.Rollout:
        """As :class:`Task`: sample, score, measure."""
        start = state.episodes + records.PPOState.from_json(state.task).left_out
        session = replace(self.session, progress=self._progress(state.step), stop=stop, clock=clock)
        count = self._count(state)
        episodes = range(start, start + count)
        if self.cfg.ppo.dynamic_sampling is not None:
            return collecting.collect_differing(session, start, count)
        if self.cfg.rollout.ahead:
            batch, self._ahead = collecting.collect_ahead(
                session, self._ahead, episodes, start + self._count(state, 2))
            return batch
        if (late := self.cfg.ppo.staleness) or state.tensors:
            return collecting.collect_stale(session, state.tensors, episodes,
                                            start + self._count(state, 1 + late))
        clock.mark("other")
        return rollout.collect_rollout(session, start, count)

    def _progress(self, step: int) -> tuple[int, int, float]:
        """As of :class:`EvalSession`, after so many steps."""
        passes = self.samples_at(step) / self.cfg.ppo.n / len(self.session.prompts)
        return step, self.total_steps(), passes

    def _share_done(self, state: TrainState) -> float:
        """0 in the first step of the run, 1 in the last."""
        left = max(self.total_samples() - state.episodes - self._count(state), 0)
        return state.step / max(state.step + -(-left // self.samples_per_step), 1)

    def plan(self, state: TrainState, batch: records.Rollout) -> task.Plan:
        """As :class:`Task`: advantages, then ``ppo_epochs`` of reshuffled minibatches.

        Updates made = (critic_epochs + ppo_epochs) x ceil(samples / mini_batch_size), less skipped
        ones and less what ``target_kl`` cuts off.

        Raises:
            RewardError: too few samples have a valid score.
        """
        check_invalid_share(int((~batch.valid).sum()), len(batch),
                            [one.error for one in batch.episodes if one.error])
        own = records.PPOState.from_json(state.task)
        experience = to_experience(batch, own, self.cfg, progress=self._share_done(state),
                                   pretrains=own.pretrains(self.cfg.ppo, state.step))
        return plan_updates(self.session, experience, state.step, own.mixed_in)

    def loss(self, atoms: records.Experience, rows: torch.Tensor, weights: torch.Tensor,
             group: task.UpdateGroup) -> task.LossTerms:
        """As :class:`Task`; :func:`ppocli.ppo.losses.ppo_loss` of the policy of this moment, or
        ``ppo.ptx.coef`` times the negative log-likelihood of examples."""
        count = len(atoms)
        if atoms.examples is not None and int(rows[0]) >= count:
            nll, tokens = ptx.examples_loss(self.session, atoms.examples, rows - count, weights)
            total = self.cfg.ppo.ptx.coef * nll
            return task.LossTerms(total, self._terms(total=total, ptx=nll), tokens)
        samples = group.rows < count
        said, which = group.counts[samples], group.rows[samples]
        mask, device = atoms.response_mask[rows], self.backend.device
        out, tokens = replay(self.session, atoms, rows, value_only=group.part == records.CRITIC)
        row, column = mask.nonzero(as_tuple=True)
        place = to_device(rows[row] * mask.shape[1] + column, device)

        def flat(x: Any) -> Any:
            return None if x is None else x.reshape(-1).index_select(0, place)

        term_weights = weights.repeat_interleave(mask.sum(1))
        if atoms.counts is not None:
            term_weights = term_weights * atoms.counts[rows][mask]
        imitated: torch.Tensor | None = None
        if atoms.imitated is not None:
            # what is in no part of the loss has the weight 0
            counted = atoms.response_mask if atoms.counts is None else atoms.counts
            told = counted[which].sum(1) * group.weights[samples].sign() * atoms.imitated[which]
            shares = atoms.imitated[rows] * weights.sign() / told.sum().clamp(min=1)
            imitated = to_device((shares[:, None] * counted[rows])[mask], device)
        found = ppo_loss(loss_options(self.cfg.ppo, atoms), logprobs=out.logprobs,
                         values=out.values, entropy=out.entropy, old_logprobs=flat(atoms.logprobs),
                         advantages=flat(atoms.advantages), old_values=flat(atoms.values),
                         returns=flat(atoms.returns), ref_logprobs=flat(atoms.ref_logprobs),
                         weights=to_device(term_weights, device), importance=flat(atoms.importance),
                         total_tokens=int(said.sum()), lengths=to_device(mask.sum(1), device),
                         imitated=imitated, full_kl=out.kl)
        return task.LossTerms(found.total, self._terms(
            **{f.name: getattr(found, f.name) for f in fields(found)}), tokens)

    def _terms(self, **known: torch.Tensor) -> torch.Tensor:
        """:attr:`LossTerms.terms` of these, and 0 for the others."""
        zero = known["total"].new_zeros(())
        return torch.stack([known.get(name, zero).detach() for name in self.terms])

    def judge(self, terms: dict[str, float]) -> task.Verdict:
        """As :class:`Task`: ``ppo.target_kl`` ends the phase, ``ppo.ratio_threshold`` skips."""
        ppo = self.cfg.ppo
        if (found := super().judge(terms)) is not task.Verdict.STEP:
            return found
        if ppo.target_kl is not None and terms["approx_kl"] > EARLY_STOP * ppo.target_kl:
            return task.Verdict.STOP
        if ppo.ratio_threshold is not None and terms["ratio"] > ppo.ratio_threshold:
            return task.Verdict.SKIP
        return found

    def why_skipped(self, terms: dict[str, float]) -> str:
        """As :class:`Task`."""
        threshold = self.cfg.ppo.ratio_threshold or 0.0
        ratio = next(text for digits in range(3, 18)
                     if float(text := f"{terms['ratio']:.{digits}g}") > threshold)
        return (f"Mean ratio {ratio} exceeds ppo.ratio_threshold={threshold:g} (log-ratios of up "
                f"to {terms['max_log_ratio']:.3g}): the policy has moved too far from the one that "
                "sampled")

    def finish(self, state: TrainState, batch: records.Rollout, plan: task.Plan,
               result: task.OptimizeResult) -> task.Finished:
        """As :class:`Task`: the KL coefficient follows its controller, signs of a run going wrong
        are counted."""
        cfg, before = self.cfg, records.PPOState.from_json(state.task)
        after = replace(after_step(before, batch, plan.atoms, cfg, state.step + 1),
                        mixed_in=before.mixed_in + ptx.examples_of(cfg.ppo, len(batch)))
        tokens = (int(batch.response_mask.sum()) + collecting.response_tokens(batch.waiting)
                  - collecting.response_tokens(state.tensors))
        if batch.drawn is not None:
            tokens = batch.drawn.tokens
            after = replace(after, left_out=before.left_out + batch.drawn.samples - len(batch))
        row = figures.step_figures(batch, before.kl_coef, result, plan.atoms, cfg)
        after, warnings = figures.watch(self.session, batch, after, row, state)
        if gap := figures.decoding_gap(self.session, result):
            after, warnings = replace(after, decoding_differs=True), [*warnings, gap]
            self.session = replace(self.session, decoding_differs=True)
        return task.Finished(row, after.to_json(), tensors=batch.waiting, warnings=warnings,
                             tokens={"rollout": tokens})

    def settled(self, state: TrainState) -> None:
        """As :class:`Task`: a reference that follows the policy does so now."""
        wanted, reference = self.cfg.model.reference, self.session.reference
        if (isinstance(reference, CopyReference) and wanted.sync_every is not None
                and state.step > 0 and state.step % wanted.sync_every == 0):
            follow(reference, self.session.policy.lm, wanted.sync_alpha)
            self._ref_responses = None

    def evaluate(self, stop: StopFlag) -> task.Evaluation:
        """As :class:`Task`: responses to the evaluation prompts, scored."""
        session = replace(self.session, progress=self._progress(self.step), stop=stop)
        found = evaluate(session)
        if not self.cfg.eval.ref_responses:
            return found
        self._ref_responses = self._ref_responses or reference_responses(session)
        return replace(found, samples=[
            {**sample, "ref_response": text}
            for sample, text in zip(found.samples, self._ref_responses, strict=True)])

    def adopt(self, saved: TrainState, fresh: TrainState) -> TrainState:
        """As :class:`Task`: another ``ppo.init_kl_coef`` starts the coefficient anew."""
        own, new = records.PPOState.from_json(saved.task), records.PPOState.from_json(fresh.task)
        self.session = replace(self.session, decoding_differs=own.decoding_differs)
        for line in figures.carried_over(own, new, self.cfg.ppo, self._share_done(saved)):
            log.info(line)
        if own.init_kl_coef != new.init_kl_coef:
            own = replace(own, kl_coef=new.init_kl_coef, init_kl_coef=new.init_kl_coef)
        return replace(saved, task=own.to_json())

    def digests(self) -> dict[str, str]:
        """As :class:`Task`: of the prompts and of the reference's weights."""
        session = self.session
        found = {"prompts": session.prompts.digest(),
                 "evaluation prompts": session.eval_prompts.digest(),
                 "ppo.ptx.data": None if session.examples is None else session.examples.digest(),
                 "reference model": session.reference_digest()}
        return {name: digest for name, digest in found.items() if digest is not None}

    def judged_by(self) -> str:
        """As :class:`Task`; under another, figures are not comparable with the best so far."""
        return self._judges(*self._how_judged(), *self.session.reward_model_digests())

    def judged_earlier(self) -> tuple[str, ...]:
        """As :class:`Task`: without weights; with all of the reward's keys, and no environment."""
        return self._judges(*self._how_judged()), self._judges(asdict(self.cfg.reward))

    def _how_judged(self) -> list[Any]:
        reward = asdict(self.cfg.reward) | {name: getattr(schema.RewardConfig(), name) for name in (
            "timeout", "retries", "overlap", "ranks")}  # how it is called
        env = {name: value for name, value in asdict(self.cfg.env).items()
               if name not in ("timeout", "retries", "workers")}
        return [reward, self.cfg.env.fn and env]

    def _judges(self, reward: dict[str, Any], *more: Any) -> str:
        for name, early in (("style", "ppocli"), ("step_separator", None), ("step_fn", None)):
            if reward[name] == early:  # as before there were others
                del reward[name]
        judge = [reward, asdict(self.cfg.generation), self.cfg.checkpoint.metric,
                 self.cfg.prompts.eval.repeat, *more]
        return hashlib.sha256(json.dumps(judge, sort_keys=True, default=str).encode()).hexdigest()

    def modules(self) -> dict[str, torch.nn.Module]:
        """As :class:`Task`: the value function's, and a reference that follows the policy."""
        policy = self.session.policy
        found: dict[str, Any] = {"value_head": policy.value_head, "value_trunk": policy.value_trunk}
        if self.cfg.model.reference.sync_every is not None:
            found["reference"] = getattr(self.session.reference, "lm", None)
        return {name: module for name, module in found.items() if module is not None}

    def kept_step(self, state: TrainState) -> int | None:
        """As :class:`Task`: the end of value pretraining, from which other runs can start."""
        return records.PPOState.from_json(state.task).pretrained_at

    def rate_factors(self, state: TrainState, update: int) -> dict[str, float]:
        """As :class:`Task`: ``ppo.scheduler``, and ``ppo.value_scheduler`` for the critic."""
        ppo, total = self.cfg.ppo, self.total_updates(state)
        return {"policy": optimizers.lr_factor(ppo.scheduler, update, total),
                "value": optimizers.lr_factor(algorithm.value_scheduler(ppo), update, total)}

    def preview(self, batch: records.Rollout) -> list[Sample]:
        """As :class:`Task`."""
        said: list[Any] = [spoken(figures.episode_row(one)) for one in batch.episodes]
        return list(zip(batch.prompts.texts, said or batch.responses, batch.shown_scores,
                        strict=True))[:4]

    def sample_rows(self, batch: records.Rollout, step: int) -> list[dict[str, Any]]:
        """As :class:`Task`."""
        return figures.rollout_samples(batch, step, self.cfg)

    def summary(self, state: TrainState) -> dict[str, Any]:
        """As :class:`Task`."""
        return {"kl_coef": records.PPOState.from_json(state.task).kl_coef}

    def write_dump(self, folder: Path, batch: records.Rollout, plan: task.Plan, step: int) -> None:
        """As :class:`Task`: the rollout's tensors, and one JSON line per sample."""
        found = {f.name: getattr(part, f.name) for part in (plan.atoms, plan.atoms.sequences)
                 for f in fields(part)}
        save_file({name: value.cpu().contiguous() for name, value in found.items()
                   if isinstance(value, torch.Tensor)}, folder / "experience.safetensors")
        with JsonlWriter(folder / "samples.jsonl") as lines:
            lines.append(figures.rollout_samples(batch, step, self.cfg))

    def close(self) -> None:
        """As :class:`Task`: what DeepSpeed has built around the reference is torn down."""
        if isinstance(reference := self.session.reference, ShardedCopy):
            reference.engine.destroy()


def build_task(setup: task.TaskSetup) -> PPOTask:
    """The task that ``ppocli train`` trains where ``task.fn`` names no other.

    Raises:
        RewardError, InputError, ConfigError: each naming the key and the fix.
    """
    return PPOTask(build_session(setup.cfg, setup.backend, setup.objects))


def plan_updates(session: Session, experience: records.Experience, step: int, mixed_in: int = 0
                 ) -> task.Plan:
    """``ppo_epochs`` passes over the experience, each in another order that (seed, step, epoch)
    alone decide; the last minibatch of a pass may be smaller. Before them come ``critic_epochs``
    passes for the value function alone, in orders of their own: the critic catches up with the
    policy before that moves on (phasic policy gradient, Cobbe et al. 2020, arXiv 2009.04416, has
    such a number of value epochs of its own). Updates in which no token counts are left out.

    Args:
        step: steps before this one.
        mixed_in: examples of ``ppo.ptx.data`` before those of this one.
    """
    ppo, groups = session.cfg.ppo, list[task.UpdateGroup]()
    part = (records.CRITIC if step < ppo.critic_warmup_steps or experience.pretrains
            else records.POLICY)
    first = ppo.critic_epochs or 0
    for epoch in range(first + ppo.ppo_epochs):
        # numpy takes [.., 0] for [..]: the 1 sets the critic's own passes apart
        own = [epoch, 1] if epoch < first else [epoch - first]
        order = np.random.default_rng([session.cfg.seed, step, *own]).permutation(len(experience))
        trains = records.CRITIC if epoch < first else part
        groups += [update_of(session, experience, rows, epoch, trains)
                   for rows in torch.from_numpy(order).split(ppo.mini_batch_size)]
    # of an update in which no token counts, momentum would still make a step
    return plan_of(session, experience, [g for g in groups if g.weights.any()], mixed_in)


def plan_of(session: Session, experience: records.Experience, groups: list[task.UpdateGroup],
            mixed_in: int) -> task.Plan:
    """These updates, with examples of ``ppo.ptx.data`` in them where there are any."""
    experience, groups = ptx.with_examples(session, experience, groups, mixed_in)
    return task.Plan(_on_device(session, experience), groups)


def update_of(session: Session, experience: records.Experience, rows: torch.Tensor, epoch: int = 0,
              part: str = records.POLICY) -> task.UpdateGroup:
    """The update of these rows of the experience, each token weighted for the whole of it."""
    ppo, lengths = session.cfg.ppo, experience.response_mask[rows].sum(1)
    said = lengths if experience.counts is None else experience.counts[rows].sum(1)
    weights = token_weights(
        said, aggregation=ppo.loss_aggregation, total_tokens=int(said.sum()),
        total_samples=max(int((said > 0).sum()), 1),
        max_tokens=sampling.longest_rollout(session.cfg)) * (said > 0)
    return task.UpdateGroup(rows, experience.sequences.spans[rows], lengths, weights, epoch, part)


def _on_device(session: Session, experience: records.Experience) -> records.Experience:
    """The figures that losses are made of on the device, once for all updates, and room for what
    the layers below the lowest that trains make of each sample. Tokens and masks stay on the CPU,
    where batches are laid out without waiting for the device."""
    names = ("logprobs", "values", "advantages", "returns", "ref_logprobs", "importance")
    there: dict[str, Any] = {name: to_device(tensor, session.backend.device) for name in names
                             if (tensor := getattr(experience, name)) is not None}
    if session.frozen_states_bytes and not experience.frozen_states:
        there["frozen_states"] = [None] * len(experience)
    if experience.ref_states and session.reference is not None:
        with session.reference.view(session.policy.lm) as view:
            there["ref_head"] = head.HeadWeights.of(view).as_now()
    return replace(experience, **there)


def replay(session: Session, experience: records.Experience, rows: torch.Tensor, *, value_only: bool
           ) -> tuple[head.TokenFigures, int]:
    """What the policy says of some rows of ``experience``, and how many tokens were computed.

    Frozen lower layers run only for samples of which nothing is remembered; what comes out of them
    is remembered then.
    """
    samples, places, split = experience.sequences.rows(rows), rows.tolist(), session.policy.split
    batch, kept = layout.lay_out(samples, pack=session.packs).to(session.backend.device), None
    if split is not None and experience.frozen_states:
        kept = experience.frozen_states
        batch = replace(batch, frozen_states=passes.known_states(kept, places, batch))
    remembers = kept is not None and batch.frozen_states is None
    other = None if experience.ref_head is None else head.OtherHead(
        to_device(torch.cat([experience.ref_states[i] for i in places]), session.backend.device),
        experience.ref_head)
    with layer_stack.inputs_at(split if remembers else None, session.policy.lm) as found:
        out = session.trained.engine(batch, temperature=session.sampling.temperature,
                                     want_entropy=algorithm.wants_entropy(session.cfg.ppo),
                                     value_only=value_only, reference=other)
    if kept is not None and found:
        passes.keep_states(kept, session.frozen_states_bytes, places,
                           (samples.lengths - 1).tolist(), batch, found[-1])
    return out, batch.tokens.numel()
