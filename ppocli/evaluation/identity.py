"""All that makes the samples of an evaluation: settings, and digests of weights and of code.

Python objects that judge samples are told apart by their code, models by their weights.
"""

from __future__ import annotations

import functools
import hashlib
import inspect
import json
import sysconfig
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from types import BuiltinFunctionType, CodeType, FunctionType, MethodType
from typing import Any

import torch

from ppocli.runs.target import Target
from ppocli.storage.atomic import sha256_file
from ppocli.tasks.ppo.digests import reference_digest, weights_digest
from ppocli.tasks.ppo.session import EvalSession
from ppocli.training.task import PythonObjects

_REWARD_KEYS = ("fn", "kwargs", "fns", "metric_fn", "on_invalid")
_PLAIN = (bool, int, float, complex, str, bytes, type(None))
_DEEPEST = 30
"""steps from an object to what it refers to"""
_NEAR = 3
"""steps within which an object holds the model that it scores with"""
_INSTALLED = tuple({sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")})
"""where code lies that is told by its name"""


def identity_of(session: EvalSession, targets: Sequence[Target], frontier: bool,
                objects: PythonObjects) -> dict[str, Any]:
    """All that makes the samples, for telling whether two evaluations are the same one.

    Args:
        session: of the policy; the weights of other models join ``models`` as they are loaded.
        objects: what took the place of reward and metric.
    """
    cfg = session.cfg
    files = [file for judge in _judges(session) for file in judge.code_files]
    return {
        "seed": cfg.seed,
        "targets": [target.model for target in targets],
        "frontier": frontier,
        "generation": json.loads(json.dumps(asdict(session.eval_sampling))),
        "prompts": {**asdict(cfg.prompts), "digest": session.eval_prompts.digest(),
                    "count": len(session.eval_prompts)},
        "reward": {key: value for key, value in asdict(cfg.reward).items() if key in _REWARD_KEYS},
        "code": {path: _sha256(path) for path in dict.fromkeys(files)},
        "judges": judge_digests(session, objects),
        "model": asdict(cfg.model),
        "base_digest": reference_digest(session),
        "chunk_size": session.chunk_size, "forward_rows": session.forward_rows,
        "logprobs_from": cfg.ppo.logprobs_from,
        "device": session.backend.device.type, "precision": session.backend.precision,
        "models": {"policy": weights_digest(session.policy.lm)},
    }


def _sha256(path: str) -> str | None:
    """Of a file of code; None for code that was typed in and has no file."""
    file = Path(path)
    return sha256_file(file) if file.is_file() else None


def judge_digests(session: EvalSession, objects: PythonObjects) -> dict[str, str]:
    """Digests by name: ``reward_fn``, ``metric_fn`` of Python objects, and ``weights of NAME``.

    A function counts by its code, its defaults and the plain values, functions and models that it
    refers to; another object also by its own plain values. Code that a name was given for is
    told by its file, so only the models that it has loaded are looked at.
    """
    found = {name: _digest(_described(value, set(), 0, plain=True))
             for name in ("reward_fn", "metric_fn")
             if (value := getattr(objects, name)) is not None}
    for part in (part for judge in _judges(session) for part in judge.parts):
        if weights := sorted(_weights(part.bound.call, [])):
            found[f"weights of {part.name}"] = _digest(weights)
    return found


def _judges(session: EvalSession) -> list[Any]:
    return [judge for judge in (session.reward, session.metric) if judge is not None]


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()


def _described(value: Any, seen: set[int], depth: int, *, plain: bool) -> Any:
    """What tells ``value`` from another one, in JSON types and the same in every process.

    Args:
        seen: functions, classes and objects that were described before: they refer to each other.
        plain: whether plain values that an object holds count. Those of objects that code merely
            refers to may be caches and counters.
    """
    if isinstance(value, _PLAIN):
        return repr(value)
    if depth > _DEEPEST:
        return type(value).__qualname__

    def inner(part: Any, plain: bool = False) -> Any:
        return _described(part, seen, depth + 1, plain=plain)

    if isinstance(value, torch.nn.Module):
        return [type(value).__qualname__, weights_digest(value)]
    if isinstance(value, set | frozenset):
        return sorted(json.dumps(inner(cell)) for cell in value)
    parts = _parts(value)
    if parts is not None:
        return [inner(part, plain) for part in parts]
    name = [type(value).__qualname__, str(getattr(value, "__qualname__", ""))]
    if id(value) in seen or isinstance(value, BuiltinFunctionType):
        return name
    seen.add(id(value))
    if isinstance(value, FunctionType):
        if value.__code__.co_filename.startswith(_INSTALLED):
            return [value.__module__, *name]
        return [inner(value.__code__), inner(value.__defaults__), inner(value.__kwdefaults__),
                [inner(part) for part in _referred(value)]]
    if isinstance(value, type):
        return [*name, [[key, inner(part)] for key, part in vars(value).items()
                        if isinstance(part, FunctionType)]]
    held = {key: cell for key, cell in _attributes(value).items()
            if plain or isinstance(cell, torch.nn.Module)}
    return [*name, inner(type(value)) if plain else "", inner(held, plain)]


def _parts(value: Any) -> list[Any] | None:
    """What ``value`` is made of; None for what is more than its parts."""
    if isinstance(value, Mapping):
        return [part for item in value.items() for part in item]
    if isinstance(value, list | tuple):
        return list(value)
    if isinstance(value, CodeType):
        # line numbers don't count: code may move
        return [value.co_code, value.co_names, value.co_varnames, value.co_consts]
    if isinstance(value, MethodType):
        return [value.__func__, value.__self__]
    if isinstance(value, functools.partial):
        return [value.func, value.args, value.keywords]
    return None


def _referred(function: FunctionType) -> list[Any]:
    """Values of a function's closure, and those globals of its module that it names."""
    found: list[Any] = []
    for cell in function.__closure__ or ():
        try:
            found.append(cell.cell_contents)
        except ValueError:  # not filled yet
            continue
    names = dict.fromkeys(_named(function.__code__))
    known = [function.__globals__[name] for name in names if name in function.__globals__]
    return found + [value for value in known if not inspect.ismodule(value)]


def _named(code: CodeType) -> list[str]:
    """Names that code uses, with those of the functions inside it."""
    return [*code.co_names, *(name for constant in code.co_consts if isinstance(constant, CodeType)
                              for name in _named(constant))]


def _attributes(value: Any) -> dict[str, Any]:
    slots = [name for base in type(value).__mro__ for name in _names(vars(base).get("__slots__"))]
    return {**{name: getattr(value, name) for name in slots if hasattr(value, name)},
            **getattr(value, "__dict__", {})}


def _names(slots: Any) -> list[str]:
    return [slots] if isinstance(slots, str) else list(slots or ())


def _weights(value: Any, above: list[int]) -> list[str]:
    """Digests of the models that ``value`` is or refers to."""
    if isinstance(value, torch.nn.Module):
        return [weights_digest(value)]
    if isinstance(value, (*_PLAIN, type)) or id(value) in above or len(above) > _NEAR:
        return []
    above = [*above, id(value)]
    if isinstance(value, FunctionType):
        inside = _referred(value)
    elif isinstance(value, MethodType):
        inside = [value.__self__]
    else:
        inside = list(_attributes(value).values())
    return [digest for part in inside for digest in _weights(part, above)]
