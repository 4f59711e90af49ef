"""A session's tensors to and from a checkpoint, and the policy as a plain Hugging Face folder."""

from __future__ import annotations

import copy
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from ppocli.engine import generators
from ppocli.engine.backend import named_trainable
from ppocli.engine.generators import Generators
from ppocli.engine.records import Experience
from ppocli.engine.run_logs import JsonlWriter
from ppocli.engine.session import Session
from ppocli.errors import CheckpointError

POLICY = "policy"
VALUE_HEAD = "value_head.safetensors"
OPTIMIZER = "optimizer.safetensors"


def save_policy(session: Session, folder: Path) -> None:
    """Write the policy as transformers would: weights, configuration as it came, tokenizer, and
    the sampling of the training as generation config."""
    folder.mkdir(parents=True, exist_ok=True)
    lm = session.policy.lm
    lm.save_pretrained(folder, safe_serialization=True)
    config = copy.deepcopy(session.loaded.export_config)
    config.architectures = [type(lm).__name__]
    config.dtype = str(next(lm.parameters()).dtype).removeprefix("torch.")
    config.save_pretrained(folder)
    session.tokenizer.save_pretrained(folder)
    _generation_config(session).save_pretrained(folder)


def _generation_config(session: Session) -> Any:
    spec, own = session.sampling, session.loaded.generation_config
    config = type(own)(
        bos_token_id=own.bos_token_id, pad_token_id=session.tokenizer.pad_token_id,
        eos_token_id=list(spec.stop_ids) if len(spec.stop_ids) != 1 else spec.stop_ids[0],
        do_sample=spec.do_sample, max_new_tokens=spec.max_new_tokens)
    if spec.do_sample:
        config.temperature, config.top_k, config.top_p = spec.temperature, spec.top_k, spec.top_p
    return config


def _optimizer_tensors(session: Session) -> dict[str, torch.Tensor]:
    """Optimizer state by parameter name: ``NAME/exp_avg`` and so on."""
    tensors = {}
    state = session.optimizer.state
    for name, parameter in named_trainable(session.policy).items():
        for slot, value in state.get(parameter, {}).items():
            if value is not None:
                tensors[f"{name}/{slot}"] = torch.as_tensor(value).detach().cpu().contiguous()
    return tensors


def write_checkpoint(session: Session, folder: Path, state: Generators) -> None:
    """Put everything that ``read_checkpoint`` needs into ``folder``; safetensors and JSON only.

    Args:
        state: of the global generators when the training state was committed.
    """
    save_policy(session, folder / POLICY)
    head = {n: p.detach().cpu() for n, p in session.policy.value_head.state_dict().items()}
    save_file(head, folder / VALUE_HEAD)
    save_file(_optimizer_tensors(session), folder / OPTIMIZER)
    generators.write(state, folder)


def write_experience(folder: Path, experience: Experience, samples: list[dict[str, Any]]) -> None:
    """A rollout for later inspection: its tensors, and one JSON line a sample."""
    tensors = {f.name: getattr(experience, f.name).contiguous() for f in fields(experience)}
    save_file(tensors, folder / "experience.safetensors")
    with JsonlWriter(folder / "samples.jsonl") as lines:
        lines.append(samples)


def _load_module(module: torch.nn.Module, tensors: dict[str, torch.Tensor], what: str,
                 allowed_missing: set[str]) -> None:
    own = module.state_dict()
    wrong = [f"{name}: {tuple(tensors[name].shape)} saved, {tuple(own[name].shape)} here"
             for name in tensors if name in own and tensors[name].shape != own[name].shape]
    missing = [f"{name} is not saved" for name in own
               if name not in tensors and name not in allowed_missing]
    extra = [f"{name} is not in the model" for name in tensors if name not in own]
    if problems := wrong + missing + extra:
        raise CheckpointError(f"The {what} of the checkpoint does not fit the model: "
                              f"{'; '.join(problems[:3])}", where="model.path",
                              fix="resume with the model the run was started with")
    module.load_state_dict(tensors, strict=False)


def _tied_names(lm: Any, saved: set[str]) -> set[str]:
    """Names of state-dict entries that share memory with an entry that is saved."""
    seen: dict[int, list[str]] = {}
    for name, tensor in lm.state_dict(keep_vars=True).items():
        seen.setdefault(id(tensor), []).append(name)
    return {name for names in seen.values() if saved & set(names) for name in names}


def _read_shards(folder: Path) -> dict[str, torch.Tensor]:
    tensors: dict[str, torch.Tensor] = {}
    for path in sorted(folder.glob("*.safetensors")):
        tensors.update(load_file(path))
    return tensors


def _restore_optimizer(session: Session, tensors: dict[str, torch.Tensor]) -> None:
    """Fill the optimizer's state by name; every parameter must find what it had."""
    parameters = named_trainable(session.policy)
    grouped: dict[str, dict[str, torch.Tensor]] = {}
    for key, value in tensors.items():
        name, slot = key.rsplit("/", 1)
        grouped.setdefault(name, {})[slot] = value
    extra = sorted(set(grouped) - set(parameters))
    # parameters that never had a gradient (critic warm-up) have no state; else all have it
    wrong = [n for n, slots in grouped.items() if n in parameters and any(
        v.dim() and v.shape != parameters[n].shape for v in slots.values())]
    if extra or wrong:
        raise CheckpointError(
            f"The optimizer state of the checkpoint does not fit: {', '.join((extra + wrong)[:3])}",
            where="model.num_layers_unfrozen, ppo.optimizer",
            fix="resume with the model and optimizer the run was started with")
    for name, slots in grouped.items():
        parameter = parameters[name]
        session.optimizer.state[parameter] = {
            slot: value if slot == "step" and parameter.device.type == "cpu"
            else value.to(parameter.device) for slot, value in slots.items()}


def read_checkpoint(session: Session, folder: Path) -> None:
    """Load weights, value head, optimizer and generators from a verified checkpoint folder.

    Raises:
        CheckpointError: a tensor is missing, superfluous or of another shape.
    """
    weights = _read_shards(folder / POLICY)
    _load_module(session.policy.lm, weights, "policy",
                 _tied_names(session.policy.lm, set(weights)))
    session.policy.lm.tie_weights()
    _load_module(session.policy.value_head, load_file(folder / VALUE_HEAD), "value head", set())
    _restore_optimizer(session, load_file(folder / OPTIMIZER))
    generators.restore(generators.read(folder), session.backend.device)
