"""All parts of a run, built once from its configuration."""

import logging
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from ppocli.config import tasks
from ppocli.config.schema import RewardConfig, TrainConfig
from ppocli.config.tasks import (
    corrects,
    decoding_scores,
    kl_coef,
    kl_term,
    longest_response,
    reference_sharded,
)
from ppocli.data import data_set, prompt_set, sources
from ppocli.distributed.backend import Backend, PassRows
from ppocli.distributed.ranks import StopFlag
from ppocli.errors import ConfigError, InputError
from ppocli.models import kernels
from ppocli.models.loading import language_model, load_adapters, model_config
from ppocli.models.loading.tokenizer import decided, load_tokenizer, stop_clock, tokenizers_of
from ppocli.models.policy import AdapterReference, Policy, Reference, frozen_split
from ppocli.models.sharded_weights import is_sharded, one_gathered
from ppocli.models.trunk import has_encoder
from ppocli.sampling import decoding
from ppocli.sampling.sampler import Sampler, SamplerSetup
from ppocli.sampling.samples import SamplingSpec
from ppocli.sampling.vllm.vllm_sampler import check_engine
from ppocli.supervised import supervised_task
from ppocli.training import build_models, optimize, optimizers
from ppocli.training.state import PhaseClock
from ppocli.training.task import PASSES, PythonObjects, StepContext

log = logging.getLogger("ppocli")


@dataclass
class EvalSession:
    """Everything needed to sample a policy's responses and to score them; it lives as long as the
    run. Only ``passes`` and ``from_decode`` change."""

    cfg: TrainConfig
    backend: Backend
    tokenizer: Any
    loaded: language_model.LoadedLM
    policy: Policy
    """the bare module: decoding and saving"""
    reference: Reference | None
    """None without a KL term"""
    eval_prompts: data_set.PromptSet
    reward: Any
    metric: Any
    sampling: SamplingSpec
    eval_sampling: SamplingSpec
    sampler: Sampler
    passes: PassRows
    """how many rows passes have had to be cut down to"""
    packs: bool
    """whether all models take rows packed without padding"""
    planned_steps: int = field(default=0, kw_only=True)
    """steps of the whole run by its configuration; 0 where that doesn't say"""
    from_decode: bool = field(init=False)
    """whether old logprobs and values are taken from the sampler"""

    def __post_init__(self) -> None:
        self.from_decode = decoding_scores(self.cfg) and (
            self.sampler.logprobs_match or self.cfg.ppo.logprobs_from == "decode")

    def context(self, stop: StopFlag | None = None, clock: PhaseClock | None = None
                ) -> StepContext:
        """What sampling and scoring need of a caller other than the training loop."""
        return StepContext(stop or StopFlag(), clock or PhaseClock(self.backend.device),
                           (0, self.planned_steps, 0.0))

    @cached_property
    def corrects(self) -> bool:
        """Whether the sampling policy and the trained one are compared, token by token."""
        return corrects(self.cfg)

    @cached_property
    def frozen_states_bytes(self) -> int:
        """Most memory for what enters the policy's lowest layer that trains, of one rollout."""
        return 0 if self.policy.split is None else self.cfg.hardware.frozen_states_mib * 2**20

    @cached_property
    def forward_rows(self) -> int:
        """Rows of one forward pass: the training micro-batch."""
        return tasks.rows_per_pass(self.cfg.ppo)

    @cached_property
    def scores_in_step(self) -> bool:
        """Whether forward passes for scoring gather weights, so that all ranks make them in step.
        """
        return self.backend.zero_stage == 3 and (
            reference_sharded(self.cfg) or is_sharded(self.policy))

    @cached_property
    def chunk_size(self) -> int:
        """Samples of one generate call."""
        return self.cfg.ppo.chunk_size or min(self.cfg.ppo.num_rollouts, 128)

    def reference_digest(self) -> str | None:
        """Digest of the reference's weights; None without one. All ranks call it in step."""
        if self.reference is None:
            return None
        with self.sampler.acting(self.policy) as policy, self.reference.view(policy.lm) as view:
            tensors = (load_adapters.base_tensors(view) if isinstance(self.reference,
                                                                      AdapterReference)
                       else view.state_dict(keep_vars=True))
            return load_adapters.tensors_digest(tensors, one_gathered)

    def reward_model_digests(self) -> list[str]:
        """Of each reward model's weights. All ranks call it in step."""
        from ppocli.rewards.reward_model import SequenceReward

        return self.backend.ranks.first_does(lambda: [
            load_adapters.tensors_digest(part.call.model.state_dict()) for part in self.reward.parts
            if isinstance(part.call, SequenceReward)])


@dataclass
class Session(EvalSession):
    """One run's parts. What ``trained`` holds changes as well."""

    trained: optimize.Trained
    prompts: data_set.PromptSet
    examples: data_set.Examples | None = field(default=None, kw_only=True)
    """of ``ppo.ptx.data``; None where none are mixed in"""


def max_prompt_tokens(cfg: TrainConfig, lm: Any) -> int:
    """Tokens that a prompt may have next to the longest response.

    Raises:
        ConfigError: the response leaves no room for a prompt.
    """
    limit = model_config.max_positions(lm)  # an encoder-decoder has that many on either side
    if limit is None:
        return 2**31
    longest = longest_response(cfg)
    if longest >= limit:
        key = "generation.max_new_tokens" if cfg.env.fn is None else "env.max_tokens"
        raise ConfigError(f"{longest} new tokens leave no room for a prompt: the model has "
                          f"{limit} positions.", where=key,
                          fix=f"set {key} below {limit}")
    return limit if has_encoder(lm) else limit - longest


def _warn_about_samples(cfg: TrainConfig, spec: SamplingSpec, sampler: Sampler) -> None:
    if not spec.is_policy_distribution:
        log.warning("Rollouts are sampled with top-k, top-p, min-p, a repetition penalty, a "
                    "minimum length or greedily: tokens do not come from the policy's own "
                    "distribution, and the KL to the reference may turn negative. "
                    "generation.top_k=0 top_p=1 min_p=0 repetition_penalty=1 min_new_tokens=0 "
                    "avoids it.")
    if not sampler.repeatable:
        log.info("%s draws other samples each time: a resumed run goes on with others than an "
                 "uninterrupted one.", type(sampler).__name__)
    if kl_term(cfg.ppo) == ("loss", "k1") and kl_coef(cfg.ppo) > 0:
        log.warning("The gradient of k1 is zero on average: as a term of the loss it holds nothing "
                    "to the reference. ppo.kl_estimator=k3+, k2 or k3 does.")


def _build_judges(cfg: TrainConfig, objects: PythonObjects, first: bool) -> tuple[Any, Any]:
    """The reward and the metric; code of the user's that they run is named."""
    from ppocli.rewards import styles
    from ppocli.rewards.scoring import build_metric, build_reward

    reward = build_reward(cfg.reward, reward_fn=objects.reward_fn, first=first, env=cfg.env)
    for tokenizer in tokenizers_of(reward):
        stop_clock(tokenizer, cfg.model.chat_template_date)
    metric = build_metric(cfg.reward, objects.metric_fn, first=first)
    for path in dict.fromkeys([*reward.code_files, *(metric.code_files if metric else [])]):
        log.info("running code from %s", path)
    for part in reward.parts:
        if part.style.name in styles.FOREIGN:
            log.info("%s is called as %s does (reward.style)", part.label,
                     styles.FOREIGN[part.style.name])
    return reward, metric


def _with_stored_scale(reward: Any) -> RewardConfig:
    """The reward's configuration, with what ``reward.scale=ref`` needs and isn't given taken from
    beside the reward model: its deviation on its training data, with ``reward.center`` its mean.

    Raises:
        InputError: there is no mean to centre by.
    """
    cfg: RewardConfig = reward.cfg
    stored = getattr(reward.parts[-1].call, "stored_scale", None)
    no_mean = cfg.center and cfg.ref_mean is None
    if cfg.scale != "ref" or cfg.fn != "reward_model" or not (cfg.ref_std is None or no_mean):
        return cfg
    if stored is None and no_mean:
        raise InputError("No mean of its scores lies with the reward model.",
                         where="reward.center, reward.kwargs.model",
                         fix="give reward.ref_mean, or a model of `ppocli reward-model`")
    if stored is None:
        return cfg
    mean = stored[0] if no_mean else cfg.ref_mean
    std = stored[1] if cfg.ref_std is None else cfg.ref_std
    log.info("scores are scaled by what lies with the reward model: ref_mean %s, ref_std %.6g",
             "none" if mean is None else f"{mean:.6g}", std)
    return replace(cfg, ref_mean=mean, ref_std=std)


def _load_prompt_sets(cfg: TrainConfig, tokenizer: Any, lm: Any, objects: PythonObjects,
                      reward: Any, metric: Any, *, training: bool = True
                      ) -> tuple[data_set.PromptSet, data_set.PromptSet]:
    """Training and evaluation prompts, checked against what reward and metric ask for. Without
    ``training`` the former are read only where the latter are taken from them."""
    keys, prompts = cfg.prompts, data_set.PromptSet([], [], {}, ())
    how: Any = {"seed": cfg.seed, "max_prompt_tokens": max_prompt_tokens(cfg, lm),
                "whole": has_encoder(lm)}
    if training or not sources.evaluation_specs(keys, objects.eval_prompts)[0].has_source:
        prompts = prompt_set.load_prompts(keys, tokenizer, items=objects.prompts, **how)
    eval_prompts = prompt_set.load_eval_prompts(keys, tokenizer, training=prompts,
                                                items=objects.eval_prompts, **how)
    for prompt_data in (prompts, eval_prompts):
        if len(prompt_data):
            reward.check_columns(list(prompt_data.columns))
    if metric is not None:
        metric.check_columns(list(eval_prompts.columns))
    for name, prompt_data in (("prompts", prompts), ("evaluation prompts", eval_prompts)):
        for note in prompt_data.notes if training or prompt_data is eval_prompts else ():
            log.info("%s: %s", name, note)
    return prompts, eval_prompts


def _check_reach(cfg: TrainConfig, policy: Policy, reference: Reference | None,
                 prompts: list[list[int]]) -> None:
    """Refuse a reference or a value model of another path that has fewer positions than the longest
    sample needs, now instead of when that comes up."""
    for key, name, model in (
            ("model.reference.path", cfg.model.reference.path, getattr(reference, "lm", None)),
            ("model.value.path", cfg.model.value.path, getattr(policy.value_trunk, "lm", None))):
        if name is not None and model is not None:
            refuse_short_reach(cfg, key, name, model, prompts, pair=has_encoder(policy.lm))


def refuse_short_reach(cfg: TrainConfig, key: str, name: str, model: Any,
                       prompts: list[list[int]], *, pair: bool) -> None:
    """Refuse a model with fewer positions than the longest sample takes.

    Args:
        model: a language model, or what is known of one before its weights are loaded.
        pair: whether an encoder reads the prompts.

    Raises:
        InputError: it has.
    """
    prompt, response = max(map(len, prompts)), longest_response(cfg)
    needed = max(prompt, response) if pair else prompt + response
    limit = model_config.max_positions(model)
    if limit is not None and needed > limit:
        raise InputError(f"{name} has {limit} positions, samples take up to {needed}.",
                         where=key, fix="lower prompts.max_length or generation.max_new_tokens, or "
                         "give a model that reaches as far as the policy")


def _take_packed(policy: Policy, reference: Reference | None) -> bool:
    """Whether all models take packed rows. All ranks call it in step."""
    models = [policy.lm, getattr(policy.value_trunk, "lm", None)]
    # each of them on every rank
    takes = [kernels.takes_packed(lm) for lm in models if lm is not None]
    all_take = all(takes)
    if reference is None:
        return all_take
    with reference.view(policy.lm) as view:
        return kernels.takes_packed(view) and all_take


def build_session(cfg: TrainConfig, backend: Backend, objects: PythonObjects) -> Session:
    """Build every part, the cheap checks first, then the models: the policy as it starts, prepared
    for training, and the reference, which may share the prepared policy's weights.

    Raises:
        RewardError, InputError, ConfigError: each naming the key and the fix.
    """
    reward, metric = _build_judges(cfg, objects, backend.ranks.first)
    # with the style of each function; the first rank alone may have built it
    cfg = replace(cfg, reward=backend.ranks.first_does(lambda: _with_stored_scale(reward)))
    cfg = decided(cfg, cfg.model.path, cfg.model.revision)
    tokenizer, unloaded = load_tokenizer(cfg.model), model_config.read_lm(cfg.model)
    prompts, eval_prompts = _load_prompt_sets(cfg, tokenizer, unloaded, objects, reward, metric)
    plays = build_models.environment_of(cfg, prompts, eval_prompts)
    examples = supervised_task.read_mixed_in(cfg, tokenizer, unloaded)
    for note in () if examples is None else examples.notes:
        log.info("ppo.ptx.data: %s", note)
    build_models.note_wording(tokenizer, bool(cfg.prompts.chat))
    token_ids = [*prompts.token_ids, *eval_prompts.token_ids]
    longest = max(map(len, token_ids))
    build_models.check_memory(cfg, backend, unloaded.config, prompt_tokens=longest)
    check_engine(cfg, backend, unloaded, longest)
    loaded = build_models.load_start(cfg, backend, objects.model)
    language_model.fit_vocabulary(tokenizer, loaded.lm, cfg.model)
    sampling, eval_sampling = build_models.sampling_specs(cfg.generation, tokenizer, loaded)
    policy = build_models.build_policy(cfg, backend, loaded, tokenizer)
    optimizer = optimizers.build_optimizer(policy, cfg.ppo)
    trained = optimize.prepare(backend, policy, optimizer, cfg.ppo.max_grad_norm)
    if backend.ranks.world == 1 and backend.zero_stage < 3:  # else samples change ranks
        policy.split = frozen_split(policy)
    reference = build_models.build_reference(cfg, backend, policy, tokenizer)
    _check_reach(cfg, policy, reference, token_ids)
    setup = SamplerSetup(cfg, backend, tokenizer, loaded)
    sampler = build_models.build_sampler(setup, plays)
    _warn_about_samples(cfg, sampling, sampler)
    return Session(cfg=cfg, backend=backend, tokenizer=tokenizer, loaded=loaded, policy=policy,
                   reference=reference, eval_prompts=eval_prompts, reward=reward, metric=metric,
                   sampling=sampling, eval_sampling=eval_sampling, sampler=sampler,
                   passes=PassRows(backend, PASSES), trained=trained, prompts=prompts,
                   examples=examples, packs=_take_packed(policy, reference),
                   planned_steps=tasks.planned_steps(cfg, len(prompts)) or 0)


def build_eval_session(cfg: TrainConfig, backend: Backend, objects: PythonObjects, *,
                       policy: str, judges: EvalSession | None = None) -> EvalSession:
    """What judges a policy as a run of ``cfg`` does at evaluation: same prompts, random numbers,
    sampling, reward, and reference (the model that ``cfg`` starts from).

    Args:
        policy: folder or Hub name of the policy, its tokenizer with it.
        judges: whose reward, metric and reference are taken instead of loading them once more.

    Raises:
        RewardError, InputError, ConfigError: each naming the key and the fix.
    """
    reward, metric = (_build_judges(cfg, objects, backend.ranks.first) if judges is None
                      else (judges.reward, judges.metric))
    cfg = replace(cfg, reward=reward.cfg)
    model_cfg = model_config.policy_config(cfg.model, policy)
    cfg = decided(cfg, policy, model_cfg.revision)
    tokenizer = load_tokenizer(model_cfg)
    loaded = decoding.load_judged(model_cfg, cfg.hardware)
    language_model.fit_vocabulary(tokenizer, loaded.lm, model_cfg)
    _, eval_prompts = _load_prompt_sets(cfg, tokenizer, loaded.lm, objects, reward, metric,
                                        training=False)
    wrapped = build_models.placed(backend, Policy(loaded.lm, None))
    reference = build_models.judging_reference(
        cfg, backend, tokenizer, loaded, None if judges is None else (judges.reference,))
    sampling, eval_sampling = build_models.sampling_specs(cfg.generation, tokenizer, loaded)
    setup = SamplerSetup(cfg, backend, tokenizer, loaded)
    return EvalSession(cfg=cfg, backend=backend, tokenizer=tokenizer, loaded=loaded, policy=wrapped,
                       reference=reference, eval_prompts=eval_prompts, reward=reward, metric=metric,
                       sampling=sampling, eval_sampling=eval_sampling,
                       sampler=build_models.build_sampler(
                           setup, build_models.environment_of(cfg, eval_prompts)),
                       passes=PassRows(backend, PASSES), packs=_take_packed(wrapped, reference),
                       planned_steps=tasks.planned_steps(cfg) or 0)
