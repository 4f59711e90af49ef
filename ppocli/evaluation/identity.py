"""All that makes the samples of an evaluation: settings, and digests of weights and of code; and
the folder whose samples are made the same way, if one is to go on.

Python objects that judge samples are told apart by their code, models by their weights.
"""

import functools
import hashlib
import inspect
import itertools
import json
import logging
import re
import sysconfig
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from types import BuiltinFunctionType, CodeType, FunctionType, MethodType
from typing import Any

import torch

from ppocli.environments.resolve import code_files
from ppocli.errors import CheckpointError
from ppocli.evaluation import request as files
from ppocli.evaluation.request import EvalRequest
from ppocli.models.loading.adapters import tensors_digest
from ppocli.models.loading.chat_template import tells_date, tokenizers_of
from ppocli.runs.target import Target
from ppocli.storage import atomic, run_folder
from ppocli.tasks.ppo.session import EvalSession
from ppocli.text import cut
from ppocli.training.task import PythonObjects

log = logging.getLogger("ppocli")

_REWARD_KEYS = ("fn", "kwargs", "fns", "metric_fn", "on_invalid", "style",
                "step_separator", "step_fn")
_LATER: tuple[tuple[str, Any], ...] = (
    ("style", "ppocli"), ("step_separator", None), ("step_fn", None), ("tools", None),
    ("chat_template", None), ("chat_template_kwargs", {}), ("chat_template_date", None))
"""what evaluations have as they were made before there was the key"""
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
    plays = {} if cfg.env.fn is None else {"env": asdict(cfg.env)}
    code = [file for judge in _judges(session) for file in judge.code_files]
    code += code_files(cfg.env) if plays else []
    dated = any(map(tells_date, (session.tokenizer, *tokenizers_of(session.reward))))
    model = replace(cfg.model, chat_template_date=cfg.model.chat_template_date if dated else None)
    prompts = replace(cfg.prompts, chat=bool(cfg.prompts.chat))
    return {
        "seed": cfg.seed, **plays,
        "targets": [target.model for target in targets], "frontier": frontier,
        "generation": json.loads(json.dumps(asdict(session.eval_sampling))),
        "prompts": {**_as_before(asdict(prompts)), "digest": session.eval_prompts.digest(),
                    "count": len(session.eval_prompts)},
        "reward": {key: value for key, value in asdict(cfg.reward).items()
                   if key in _REWARD_KEYS and (key, value) not in _LATER},
        # code that was typed in has no file
        "code": {path: atomic.sha256_file(Path(path)) if Path(path).is_file() else None
                 for path in dict.fromkeys(code)},
        "judges": judge_digests(session, objects),
        "model": _as_before(asdict(model)), "base_digest": session.reference_digest(),
        "chunk_size": session.chunk_size, "forward_rows": session.forward_rows,
        "logprobs_from": cfg.ppo.logprobs_from,
        "device": session.backend.device.type, "precision": session.backend.precision,
        "models": {"policy": tensors_digest(session.policy.lm.state_dict())}}


def _as_before(section: dict[str, Any]) -> dict[str, Any]:
    """Without keys that later versions have brought, where they say nothing."""
    return {key: _as_before(value) if key == "eval" else value for key, value in section.items()
            if (key, value) not in _LATER}


def choose(default: Path, request: EvalRequest, identity: dict[str, Any]) -> Path:
    """The folder to work in: that of an evaluation to go on with, or a new one, made.

    Args:
        default: the folder under its own name, without a number.

    Raises:
        CheckpointError: the evaluation to go on with was begun under other settings.
        DiskError: the folder can't be made.
    """
    if request.resume:
        candidates = [path for path in _numbered(default) if path == default or not request.name]
        unfinished = [folder for folder in candidates if not files.is_finished(folder)]
        for folder in (*reversed(unfinished), *reversed(candidates)):
            if not differences(folder, identity):
                return folder
        if unfinished or (candidates and request.name):
            check_same((unfinished or candidates)[-1], identity)
        log.info("there is no evaluation to go on with in %s: starting afresh", default.parent)
    with files.naming_output():
        run_folder.probe_writable(default.parent)
        if request.overwrite:
            atomic.make_dirs(default)
            return default
        numbered = (default.with_name(f"{default.name}-{n}") for n in itertools.count(2))
        for path in itertools.chain([default], numbered):
            with atomic.disk_errors(path), suppress(FileExistsError):
                path.mkdir()
                return path
            if not files.is_finished(path) and path.is_dir():
                log.info("%s holds an unfinished evaluation; to go on with it: the same command "
                         "with --resume --name %s", path, path.name)
    raise AssertionError("unreachable")


def _numbered(default: Path) -> list[Path]:
    """The folders that are there under that name, the one without a number first."""
    pattern = re.compile(re.escape(default.name) + r"(?:-([1-9][0-9]+|[2-9]))?")
    numbers = {path: int(match[1] or 1) for path in default.parent.glob("*")
               if path.is_dir() and (match := pattern.fullmatch(path.name))}
    return sorted(numbers, key=numbers.__getitem__)


def begun_at(default: Path) -> str | None:
    """``model.chat_template_date`` of the newest evaluation under that name, None where no template
    told the date."""
    for folder in reversed(_numbered(default)):
        settings = _flat((atomic.read_json(folder / files.SETTINGS) or {}).get("identity"))
        if isinstance(date := settings.get("model.chat_template_date"), str):
            return date
    return None


def differences(folder: Path, identity: dict[str, Any]) -> list[str]:
    """Lines on what differs between the settings a folder was begun with and ``identity``.

    Models are compared where both name their weights: those that weren't reached yet have none.
    """
    if files.is_empty(folder / files.SAMPLES) and not files.is_finished(folder):
        return []
    if (old := atomic.read_json(folder / files.SETTINGS)) is None:
        return [f"{folder / files.SETTINGS} is missing or damaged"]
    before, now = _flat(old.get("identity", {})), _flat(identity)
    names = list(dict.fromkeys([*before, *now]))
    return [f"{name}: {_shown(before.get(name))} -> {_shown(now.get(name))}" for name in names
            if before.get(name) != now.get(name)
            and not (name.partition(".")[0] == "models" and not (name in before and name in now))]


def check_same(folder: Path, identity: dict[str, Any]) -> None:
    """Refuse to go on with samples of something else.

    Raises:
        CheckpointError: names what differs.
    """
    if lines := differences(folder, identity):
        more = [f"  and {len(lines) - 8} more"] if len(lines) > 8 else []
        raise CheckpointError(
            "\n".join([f"{folder} was begun under other settings:",
                       *(f"  {line}" for line in lines[:8]), *more]),
            where=str(folder / files.SETTINGS), fix="give the settings it was begun "
            "with; or start again: --overwrite in place of --resume; or choose another --name")


def _flat(value: Any, name: str = "") -> dict[str, Any]:
    if isinstance(value, dict) and value:
        return {key: leaf for part, inner in value.items()
                for key, leaf in _flat(inner, f"{name}.{part}" if name else str(part)).items()}
    return {name: value}


def _shown(value: Any) -> str:
    return cut("none" if value is None else value if isinstance(value, str)
               else json.dumps(value), 80)


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
        if weights := sorted(_weights(part.call, [])):
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
        return [type(value).__qualname__, tensors_digest(value.state_dict())]
    if isinstance(value, set | frozenset):
        return sorted(json.dumps(inner(cell)) for cell in value)
    if (parts := _parts(value)) is not None:
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
        with suppress(ValueError):  # not filled yet
            found.append(cell.cell_contents)
    names = dict.fromkeys(_named(function.__code__))
    known = [function.__globals__[name] for name in names if name in function.__globals__]
    return found + [value for value in known if not inspect.ismodule(value)]


def _named(code: CodeType) -> list[str]:
    """Names that code uses, with those of the functions inside it."""
    return [*code.co_names, *(name for constant in code.co_consts if isinstance(constant, CodeType)
                              for name in _named(constant))]


def _attributes(value: Any) -> dict[str, Any]:
    state: Any = object.__getstate__(value)  # where there are slots, a pair: __dict__ and those
    parts = reversed(state) if isinstance(state, tuple) else [state]
    return {name: cell for part in parts for name, cell in (part or {}).items()}


def _weights(value: Any, above: list[int]) -> list[str]:
    """Digests of the models that ``value`` is or refers to."""
    if isinstance(value, torch.nn.Module):
        return [tensors_digest(value.state_dict())]
    if isinstance(value, (*_PLAIN, type)) or id(value) in above or len(above) > _NEAR:
        return []
    inside = _referred(value) if isinstance(value, FunctionType) else (
        [value.__self__] if isinstance(value, MethodType) else _attributes(value).values())
    return [digest for part in inside for digest in _weights(part, [*above, id(value)])]
