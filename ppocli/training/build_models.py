"""Builds what a run trains: the policy with its value function, the reference beside it; how the
policy is sampled from, which environment answers it, and how it is written."""

import logging
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar, cast

import torch
from safetensors.torch import load_file

from ppocli.config import schema, tasks
from ppocli.config.text import first_line
from ppocli.config.user_code import CodeSetting, Kind, build
from ppocli.data.data_set import PromptSet
from ppocli.distributed.backend import Backend
from ppocli.distributed.launchers import launched_here
from ppocli.environments.env_calls import Calls
from ppocli.environments.registry import code_files, resolve
from ppocli.errors import ConfigError, InputError
from ppocli.models import memory_check
from ppocli.models import policy as policies
from ppocli.models import trunk as trunks
from ppocli.models.head import output_rows, set_vocabulary, vocabulary_of
from ppocli.models.kernels import route_linears
from ppocli.models.loading import model_config, reference_and_value
from ppocli.models.loading.language_model import LoadedLM, empty_lm
from ppocli.models.loading.tokenizer import stop_rules
from ppocli.models.policy import AdapterReference, CopyReference, Reference, share_trunk
from ppocli.models.sharded_weights import gathered, load_in_parts, sharded_copy
from ppocli.runs.checkpoints import saved_critic
from ppocli.runs.model_files import VALUE_HEAD, VALUE_TRUNK, WITH_TEMPLATE, adapter_at, named_base
from ppocli.sampling.decoding import load_decodable, load_policy
from ppocli.sampling.episode_sampler import EpisodeSampler
from ppocli.sampling.sampler import DecodeSampler, Sampler, SamplerSetup
from ppocli.sampling.samples import SAMPLING_KEYS, SamplingSpec
from ppocli.sampling.vllm.vllm_sampler import VllmSampler
from ppocli.training.checkpoint_writing import SavedModel
from ppocli.training.resume import fill_module

log = logging.getLogger("ppocli")

T = TypeVar("T", bound=torch.nn.Module)
ENGINES: dict[str, Callable[[SamplerSetup], Sampler]] = {
    "decode": DecodeSampler, "vllm": VllmSampler}
"""what ``rollout.engine`` names beside import paths"""


def check_memory(cfg: schema.TrainConfig, backend: Backend, lm_config: Any, *, prompt_tokens: int,
                 new_tokens: int | None = None) -> None:
    """Refuse a run that can't fit, before any rank loads weights.

    Args:
        prompt_tokens, new_tokens: as of :func:`ppocli.models.memory.estimate`.

    Raises:
        OutOfMemoryError: it doesn't.
    """
    ranks, hardware = backend.ranks, cfg.hardware
    # a dry run is one process, and checks the memory of the whole run
    planned = hardware.num_processes * hardware.num_nodes if ranks.world == 1 else ranks.world
    ranks.all_do(lambda: memory_check.check_memory(
        cfg, lm_config, prompt_tokens=prompt_tokens, new_tokens=new_tokens, device=backend.device,
        ranks=planned, ranks_on_host=launched_here(hardware.num_processes), warn=ranks.first),
        "memory")


def copy_reference(cfg: schema.TrainConfig, backend: Backend, tokenizer: Any, policy: Any
                   ) -> Reference | None:
    """The reference as a model of its own, also where a training shares it with its policy.

    Args:
        policy: the policy's model.
    """
    reference, offload = cfg.model.reference, cfg.model.reference.offload
    if reference.kind == "none":
        return None
    in_parts = (backend.zero_stage == 3 and tasks.reference_sharded(cfg)
                and not _starts_as_adapter(cfg, reference.path))
    load, empty = (partial(reference_and_value.load_reference, how, cfg.model, cfg.hardware)
                   for how in (load_decodable, empty_lm))
    lm = (load_in_parts(cfg, backend, load, empty, offload=offload) if in_parts else load()).lm
    device = backend.device if reference.device is None else torch.device(reference.device)
    if reference.path is not None:
        source = replace(cfg.model, path=reference.path, revision=None)
        reference_and_value.check_same_tokens(tokenizer, policy, lm, source, "model.reference.path")
        ours, theirs = vocabulary_of(policy), output_rows(lm)
        if theirs < ours.size:
            raise InputError(f"The policy samples ids up to {ours.size - 1}, {reference.path} has "
                             f"logits for only {theirs}.", where="model.reference.path",
                             fix="give a model of the policy's own family and vocabulary")
    # the same ids as the policy's, however many rows either has
    set_vocabulary(lm, vocabulary_of(policy))
    route_linears(lm, backend.products)
    if in_parts:
        return sharded_copy(cfg, lm)
    try:
        return CopyReference(lm if offload else lm.to(device), device, offload)
    except (RuntimeError, AssertionError) as error:  # torch's words for no such device
        raise ConfigError(f"The reference can't be put on {reference.device}: {first_line(error)}",
                          where="model.reference.device", fix="name a device that is there, or "
                          "leave the key out") from error


def _starts_as_adapter(cfg: schema.TrainConfig, reference: str | None = None) -> bool:
    """Whether ``model.path``, or the path of a reference, names an adapter."""
    key, revision = ("model.path", cfg.model.revision) if reference is None else (
        "model.reference.path", None)
    return adapter_at(reference or cfg.model.path, key=key, revision=revision) is not None


def judging_reference(cfg: schema.TrainConfig, backend: Backend, tokenizer: Any, loaded: LoadedLM,
                      lent: tuple[Reference | None] | None) -> Reference | None:
    """The reference of an evaluation: an adapter on the model that ``cfg`` starts from is switched
    off, anything else is compared with a copy.

    Args:
        loaded: the policy that is judged.
        lent: the reference of another policy under the same ``cfg``, taken where it will do.
    """
    reference, adapter = cfg.model.reference, loaded.adapter
    start = cfg.model.path, cfg.model.revision
    if reference.kind == "adapter" and (folder := adapter_at(
            start[0], key="model.path", revision=start[1])):
        start = named_base(folder)[:2]
    if (adapter is not None and reference.kind in ("auto", "adapter") and reference.path is None
            and (adapter.base.path, adapter.base.revision) == start):
        return AdapterReference()
    if lent is None or isinstance(lent[0], AdapterReference):
        return copy_reference(cfg, backend, tokenizer, loaded.lm)
    return lent[0]


def build_reference(cfg: schema.TrainConfig, backend: Backend, policy: policies.Policy,
                    tokenizer: Any) -> Reference | None:
    """The reference of a training.

    Args:
        policy: prepared for training, its weights still those it starts from.

    Raises:
        InputError: it can't be loaded, or can't share the policy's trunk.
    """
    if (kind := model_config.reference_kind(cfg.model)) == "adapter":
        return AdapterReference(policy.split)
    if kind == "shared" and backend.zero_stage == 3:  # parts are shared with nobody
        cfg, kind = replace(cfg, model=replace(cfg.model, dtype=cfg.hardware.weights)), "copy"
    if kind != "shared":
        return copy_reference(cfg, backend, tokenizer, policy.lm)
    try:
        return share_trunk(policy.lm, offload=cfg.model.reference.offload)
    except ValueError as error:
        raise InputError(f"The reference can't share the policy's trunk: {error}.",
                         where="model.reference.kind",
                         fix="set model.reference.kind=copy") from error


def load_start(cfg: schema.TrainConfig, backend: Backend, model: Any = None, *,
               scores: bool = False) -> LoadedLM:
    """The model that training starts from; under ZeRO 3 in parts already, unless an adapter is to
    be attached to it.

    Args:
        model: taken in place of loading ``model.path``, which holds a copy of it.
        scores: as of :func:`ppocli.sampling.decoding.load_policy`.

    Raises:
        PpocliError: as :func:`ppocli.sampling.decoding.load_policy`.
    """
    log.info("loading %s", cfg.model.path)
    whole = partial(load_policy, cfg.model, cfg.hardware, cfg.seed, model, scores=scores)
    if (backend.zero_stage < 3 or tasks.adapter_kind(cfg.model) is not None
            or _starts_as_adapter(cfg)):
        return whole()
    return load_in_parts(cfg, backend, whole, partial(empty_lm, cfg.model, scores=scores),
                         offload=cfg.hardware.offload_param)


def build_policy(cfg: schema.TrainConfig, backend: Backend, loaded: LoadedLM, tokenizer: Any
                 ) -> policies.Policy:
    """The policy on its device, in eval mode, with what is frozen frozen.

    Raises:
        InputError: layers can't be found, or the value function can't be built.
    """
    freeze(cfg, loaded.lm)
    # a branch is cut from whole layers
    with gathered(loaded.lm, backend.zero_stage if cfg.model.value.kind == "branch" else 0):
        head, trunk = _value_function(cfg, loaded, tokenizer)
    return placed(backend, policies.Policy(loaded.lm, head, trunk))


def freeze(cfg: schema.TrainConfig, lm: Any) -> None:
    """Freeze what ``model.num_layers_unfrozen`` leaves out, and checkpoint gradients if asked to.

    Raises:
        InputError: layers can't be found.
    """
    try:
        trunks.freeze_lower_layers(lm, cfg.model.num_layers_unfrozen)
    except ValueError as error:
        raise InputError(f"model.num_layers_unfrozen can't be used: {error}.",
                         where="model.num_layers_unfrozen", fix="leave it at -1") from error
    if cfg.model.gradient_checkpointing:
        _checkpoint_gradients(lm)


def placed(backend: Backend, policy: T) -> T:
    """A module on its device, in eval mode."""
    if backend.zero_stage < 3:
        policy = policy.to(backend.device)
    else:  # weights follow when they are sharded: they never lie on one device as a whole
        for module in policy.modules():
            for name, buffer in module._buffers.items():
                module._buffers[name] = None if buffer is None else buffer.to(backend.device)
    route_linears(policy, backend.products)
    return policy.eval()


def _checkpoint_gradients(lm: Any) -> None:
    # transformers renamed it in 5.2x; the old name warns there and is the only one before
    enable = getattr(lm, "activation_checkpointing_enable", None)
    try:
        (enable or lm.gradient_checkpointing_enable)({"use_reentrant": False})
    except ValueError as error:
        raise InputError(str(error), where="model.gradient_checkpointing",
                         fix="set model.gradient_checkpointing=false") from error


def _value_function(cfg: schema.TrainConfig, loaded: LoadedLM, tokenizer: Any) -> tuple[Any, Any]:
    """The value head and, unless it reads the policy's own states, what makes its states."""
    value = cfg.model.value
    if not tasks.needs_critic(cfg):
        return None, None
    trunk: Any = None
    try:
        if value.kind == "model":
            trunk, head = reference_and_value.load_value_model(cfg.model, tokenizer, loaded.lm,
                                                               cfg.seed)
            trunks.freeze_lower_layers(trunk.lm, value.num_layers_unfrozen)
        else:
            head = policies.build_value_head(loaded.lm, cfg.seed)
            if value.kind == "branch":
                trunk = policies.ValueBranch(loaded.lm, value.num_layers_unfrozen)
            elif value.kind == "adapter":
                trunk = policies.ValueAdapter(loaded.lm)
        if value.freeze_attention:
            trunks.freeze_attention(trunk)
    except ValueError as error:
        raise InputError(f"The value function can't be built: {error}.", where="model.value",
                         fix="set model.value.kind=head, or change "
                         "model.value.num_layers_unfrozen") from error
    if (saved := saved_critic(cfg.model)) is not None:
        log.info("values start as those of %s", saved)
        for module, name in ((head, VALUE_HEAD), (trunk, VALUE_TRUNK)):
            if module is not None:
                tensors = load_file(saved / name) if (saved / name).is_file() else (
                    reference_and_value.value_tensors(
                        saved, module.state_dict(), cast(Any, loaded.adapter)))
                fill_module(module, tensors, "value function", where="model.value.path",
                            fix="start from the model that the other run started from, with its "
                            "model.value and model.peft")
    if value.kind == "model" and cfg.model.gradient_checkpointing:
        _checkpoint_gradients(trunk.lm)
    return head, trunk


def sampling_specs(cfg: schema.GenerationConfig, tokenizer: Any, loaded: LoadedLM
                   ) -> tuple[SamplingSpec, SamplingSpec]:
    """Sampling in training and at evaluation, the latter with ``generation.eval`` laid over it."""
    base = {name: getattr(cfg, name) for name in SAMPLING_KEYS}
    over = {name: value for name in SAMPLING_KEYS
            if (value := getattr(cfg.eval, name)) is not None}
    stop_ids, stops = stop_rules(tokenizer, loaded, cfg)
    lengths = None if cfg.length_sampler is None else (cfg.length_sampler[0], cfg.length_sampler[1])
    spec = SamplingSpec(stop_ids=stop_ids, stop_sequences=stops, length_range=lengths, **base)
    return spec, replace(spec, length_range=None, **over)


def build_sampler(setup: SamplerSetup, calls: Calls | None = None) -> Sampler:
    """The sampler that ``rollout.engine`` names, with an environment that answers where there is
    one.

    Raises:
        ConfigError: its import path leads nowhere, or the model takes no part in episodes.
    """
    cfg = setup.cfg.rollout
    sampler: Sampler = ENGINES[cfg.engine](setup) if cfg.engine in ENGINES else build(
        CodeSetting(cfg.engine, "rollout.engine", Kind("class", ConfigError)), Sampler, setup,
        key="rollout.kwargs", kwargs=cfg.kwargs)
    if calls is None:
        return sampler
    if setup.loaded.decoder_start is not None:
        raise ConfigError("An encoder-decoder answers a prompt once; episodes of several turns "
                          "need a causal model.", where="env.fn, model.path",
                          fix="leave env.fn out, or use another model")
    return EpisodeSampler(sampler, calls, setup.tokenizer, chat=bool(setup.cfg.prompts.chat))


def note_wording(tokenizer: Any, chat: bool | None) -> None:
    """Write with the tokenizer whether the model was trained on what its chat template rendered, as
    of :func:`~ppocli.runs.model_files.trained_with_template`; None: nothing is known."""
    saved = tokenizer.init_kwargs  # what transformers writes into tokenizer_config.json
    saved.pop(WITH_TEMPLATE, None)
    if chat is not None and getattr(tokenizer, "chat_template", None):
        saved[WITH_TEMPLATE] = chat


def saved_policy(loaded: LoadedLM, spec: SamplingSpec, tokenizer: Any) -> SavedModel:
    """How a policy is written; the sampling of its training is its generation config."""
    loaded_config = loaded.generation_config
    config = type(loaded_config)(
        bos_token_id=loaded_config.bos_token_id, pad_token_id=tokenizer.pad_token_id,
        eos_token_id=spec.stop_ids[0] if len(spec.stop_ids) == 1 else list(spec.stop_ids) or None,
        do_sample=spec.do_sample, max_new_tokens=spec.max_new_tokens,
        decoder_start_token_id=loaded.decoder_start)
    if spec.do_sample:
        config.temperature, config.top_k, config.top_p = spec.temperature, spec.top_k, spec.top_p
        config.min_p = spec.min_p or None
    config.min_new_tokens = spec.min_new_tokens or None
    if spec.repetition_penalty != 1.0:
        config.repetition_penalty = spec.repetition_penalty
    return SavedModel(loaded.lm, loaded.export_config, config, tokenizer, loaded.adapter)


def environment_of(cfg: schema.TrainConfig, prompts: PromptSet,
                   *others: PromptSet) -> Calls | None:
    """What plays ``env.fn``, tried once on the first prompt; None where there is none.

    Raises:
        RewardError: it can't be found, made or played.
    """
    if cfg.env.fn is None:
        return None
    for path in code_files(cfg.env):
        log.info("running code from %s", path)
    environments = [resolve(cfg.env, list(one.columns)) for one in (prompts, *others)]
    calls = Calls(environments[0], cfg.env, cfg.seed, cfg.ppo.n)
    calls.rehearse(prompts)
    if not calls.what.deterministic:
        log.warning("%s says that it keeps state outside (deterministic = False): a resumed run "
                    "plays other episodes than an uninterrupted one, and evaluations differ by "
                    "chance.", calls.what.label)
    return calls
