"""The config keys as a flat table: types and allowed values, read off the dataclasses of
:mod:`ppocli.config.schema`; and the keys of earlier versions.
"""

import ast
import dataclasses
import inspect
import logging
import sys
import typing
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from typing import Any

from omegaconf import BooleanNode, FloatNode, IntegerNode, StringNode

from ppocli.builtin.names import config_groups, shipped_table
from ppocli.config.schema import TrainConfig
from ppocli.config.text import did_you_mean, shown

log = logging.getLogger("ppocli")

_WORDS = {int: ("a whole number", "whole numbers"), float: ("a number", "numbers"),
          bool: ("true or false", "true/false values"), str: ("text", "texts"),
          Any: ("any value", "values")}
"""of each type: the words for one value, and for several"""

_NODES: dict[Any, Any] = {int: IntegerNode, float: FloatNode, bool: BooleanNode, str: StringNode}
_PLACES = ("run_name", "resume")


@dataclass(frozen=True, slots=True)
class Key:
    """One leaf of the schema. ``item`` is the element type of a list, else the type itself."""

    name: str
    kind: str  # "scalar", "list", "mapping", or "sweep": one value or a list of several
    item: Any
    optional: bool
    default: Any
    metadata: Mapping[str, Any]
    section: type
    """the dataclass that has this field"""

    @property
    def doc(self) -> str:
        """What it means."""
        return doc_of(self.section, self.name.rpartition(".")[2])

    @property
    def expected(self) -> str:
        """What the key takes, in words: ``a number or null``."""
        one, many = _WORDS.get(self.item, ("a mapping", ""))
        text = {"list": f"a list of {many}", "sweep": f"{one}, a list of {many},"}.get(
            self.kind, one)
        return f"{text} or null" if self.optional else text

    @property
    def allowed(self) -> str:
        """The allowed values in words: ``one of a, b`` or ``> 0 and <= 1``; empty if any."""
        if self.metadata.get("choices"):
            other = " or an import path" if self.metadata.get("import_path") else ""
            return "one of " + ", ".join(self.metadata["choices"]) + other
        signs = (("gt", ">"), ("ge", ">="), ("lt", "<"), ("le", "<="))
        return " and ".join(f"{sign} {self.metadata[bound]:g}" for bound, sign in signs
                            if self.metadata.get(bound) is not None)

    def converted(self, value: Any) -> Any:
        """One value or several of ``item``, converted as OmegaConf does for a key of that type;
        several paths of rows as one text.

        Raises:
            OmegaConfBaseException, ValueError: a value can't be converted.
        """
        if value is None:
            return None
        values = [_NODES[self.item](each, is_optional=False)._value() for each in several(value)]
        if self.metadata["holds"] == "rows":
            return joined_paths(values)
        return values if isinstance(value, list) else values[0]


def doc_of(section: type, name: str) -> str:
    """What a field of the schema means: the docstring under it, in its class or one above."""
    return next((doc for base in section.__mro__[:-1]
                 if (doc := _docs(base.__module__).get((base.__name__, name)))), "")


@cache
def _docs(module: str) -> Mapping[tuple[str, str], str]:
    """The docstrings under fields, by class and field. Python drops them, so they are parsed from
    the source when they are first needed, which takes some milliseconds."""
    docs: dict[tuple[str, str], str] = {}
    statements = ast.parse(inspect.getsource(sys.modules[module])).body
    for section in (each for each in statements if isinstance(each, ast.ClassDef)):
        for above, below in pairwise(section.body):
            match above, below:
                case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(ast.Constant(str(doc))):
                    docs[section.name, name] = " ".join(doc.split())
    return docs


@cache
def schema_keys() -> Mapping[str, Key]:
    """All leaf keys by dotted name, in the order of the schema."""
    return {key.name: key for key in _leaves(TrainConfig(), "")}


@cache
def schema_sections() -> tuple[str, ...]:
    """The dotted names of all nodes that hold keys: ``ppo``, ``ppo.optimizer``, ..."""
    parts = [name.split(".") for name in schema_keys()]
    return tuple(dict.fromkeys(".".join(one[:depth]) for one in parts
                               for depth in range(1, len(one))))


def free_mapping_of(name: str) -> str | None:
    """The key whose free mapping ``name`` lies in: ``reward.kwargs`` for ``reward.kwargs.x``."""
    return next((key.name for key in schema_keys().values()
                 if key.kind == "mapping" and name.startswith(key.name + ".")), None)


def key_for(name: str) -> Key | None:
    """The schema key that ``name`` is, or lies in if that is a free mapping; else None."""
    return schema_keys().get(free_mapping_of(name) or name)


@cache
def _names_elsewhere() -> tuple[tuple[str, str, str], ...]:
    """Settings of other libraries: their name, the library, and our key."""
    return tuple((name, library, key)
                 for key, libraries in shipped_table("other_names.yaml").items()
                 for library, names in libraries.items() for name in names.split())


def takes_escapes(name: str) -> bool:
    """Whether texts typed for the key ``name`` are read by :func:`ppocli.config.text.unescaped`:
    all but paths, import paths, and what says where a run lies."""
    key = key_for(name)
    return (key is not None and key.item not in (int, float, bool) and name not in _PLACES
            and key.metadata["holds"] not in ("path", "rows", "code"))


def named_elsewhere(name: str, task: str | None = None) -> dict[str, str]:
    """Our keys for what another library calls ``name``, each with that library's name for it:
    ``{"ppo.optimizer.lr": "TRL's learning_rate"}``.

    A name counts by its last parts: ``ppo.learning_rate`` is TRL's ``learning_rate``.

    Args:
        task: ``sft`` or ``reward_model``, whose settings are meant; by default the section that the
            name begins with, else PPO's.
    """
    parts, ours = name.split("."), {key.rpartition(".")[2] for key in schema_keys()}
    section = next((each for each in (parts[0], task) if each in ("sft", "reward_model")), "ppo")
    by_overlap: dict[int, dict[str, str]] = {}
    for other, library, here in _names_elsewhere():
        theirs = other.split(".")
        same = max((n for n in range(1, 1 + len(parts)) if parts[-n:] == theirs[-n:]), default=0)
        root, _, rest = here.partition(".")
        key = here if section == "ppo" or root not in ("ppo", "sft") else f"{section}.{rest}"
        others = ("data", "sft", "reward_model") if section == "ppo" else (
            "prompts", "generation", "reward")
        if root not in others and key in schema_keys() and (
                same > 1 or other == name or (same == 1 and parts[-1] not in ours)):
            by_overlap.setdefault(99 if other == name else same, {}).setdefault(
                key, other if library == "other" else f"{library}'s {other}")
    return by_overlap[max(by_overlap)] if by_overlap else {}


def format_foreign_names(key_names: Mapping[str, str]) -> str:
    """The result of :func:`named_elsewhere` as a part of a sentence; "" for an empty one."""
    differ = shipped_table("other_names_differ.yaml")

    def fitted(key: str, name: str) -> str:
        note = differ.get(name.rpartition(" ")[2], differ.get(key))
        return f"{name} is {key}" + ("" if note is None else f" ({note})")

    names = " and ".join(fitted(key, name) for key, name in key_names.items())
    return names and f"; here {names} (docs/coming-from-trlx-and-trl.md)"


def why_unknown(name: str, task: str | None = None) -> str:
    """The problem with a key that doesn't exist; ``task`` as for :func:`named_elsewhere`."""
    for key, instead in GONE.items():
        if f"{name}.".startswith(f"{key}."):
            return f"no longer exists: {instead}"
    if name in schema_sections():
        inside = [key for key in schema_keys() if key.startswith(name + ".")]
        return (f"is a section, not a single value; it holds {', '.join(inside[:3])}"
                + (", ..." if len(inside) > 3 else ""))
    names = dict.fromkeys([*schema_keys(), *schema_sections(), *config_groups(),
                           *["recipe"] * ("." not in name)])
    elsewhere = format_foreign_names(named_elsewhere(name, task))
    return f"unknown key{elsewhere or did_you_mean(name, names)}"


def why_wrong(key: Key, name: str, value: Any) -> str:
    """The problem with a value of a wrong type.

    Args:
        name: ``key``'s name, or that of an item in its free mapping.
    """
    text = f"{shown(value)} must be {key.expected}"
    if key.kind == "scalar" and isinstance(value, list):
        text += f"; to try several values: -m {name}={','.join(map(str, value))}"
    elif key.item is int and isinstance(value, float) and value.is_integer() and value < 2**53:
        text += f", without a point or an exponent: {name}={value:.0f}"
    return text


def is_import_path(text: str) -> bool:
    """Whether it has the form of a path to user code, such as ``pkg.module:Class`` or
    ``path/to/file.py:Class``, rather than of a short name."""
    return ":" in text or "." in text


def several(value: Any) -> list[Any]:
    """A value that may be one, a list of several, or null, as a list."""
    return [] if value is None else value if isinstance(value, list) else [value]


def row_paths(path: str) -> list[str]:
    """The paths in a text of several, ``{a.jsonl,b.jsonl}``, else the text itself."""
    joined = path.startswith("{") and path.endswith("}")
    return [part.strip() for part in path[1:-1].split(",")] if joined else [path]


def joined_paths(paths: Sequence[str]) -> str:
    """One text of several paths, ``{a.jsonl,b.jsonl}``, as in shells.

    Raises:
        ValueError: one is empty, or has a comma or a brace in it.
    """
    if len(paths) == 1:
        return paths[0]
    if not paths or any(not path.strip() or set(path) & set("{},") for path in paths):
        raise ValueError("a list of paths needs at least one, without commas and braces in them")
    return "{" + ",".join(paths) + "}"


def _leaves(section: Any, prefix: str) -> Iterator[Key]:
    hints = typing.get_type_hints(type(section))
    for field in dataclasses.fields(section):
        name, hint, default = prefix + field.name, hints[field.name], getattr(section, field.name)
        if dataclasses.is_dataclass(default):
            yield from _leaves(default, name + ".")
            continue
        if (each := field.metadata.get("each")) is not None:
            yield Key(name, "sweep", each, True, default, field.metadata, type(section))
            continue
        optional = type(None) in typing.get_args(hint)
        if optional:
            hint = next(part for part in typing.get_args(hint) if part is not type(None))
        kind = {list: "list", dict: "mapping"}.get(typing.get_origin(hint), "scalar")
        item = typing.get_args(hint)[0] if kind == "list" else hint
        yield Key(name, kind, item, optional, default, field.metadata, type(section))


# Keys of earlier versions -------------------------------------------------------------------------

GONE = {
    "checkpoint.background": "training waits while a checkpoint is written",
    "eval.ref_responses": "ppocli generate --model MODEL samples from the model trained from",
    "sweep.jobs": "hydra/launcher=joblib hydra.launcher.n_jobs=N runs N jobs at a time",
    "sweep.launcher": "hydra/launcher=submitit_slurm runs the jobs on Slurm",
    "sweep.slurm": "with hydra/launcher=submitit_slurm, Slurm's settings are hydra.launcher.NAME",
    "sweep.prune": "a search runs each of its jobs to the end",
    "hardware.node_rank": "torchrun or srun starts the processes of several machines",
    "hardware.rdzv_endpoint": "torchrun or srun starts the processes of several machines",
    "model.arch": "the model's config.json says whether it is an encoder-decoder",
    "rollout.transfer": "vLLM servers read new weights from a folder (rollout.weights_dir)",
}
"""dotted key or section -> its replacement, as the end of a sentence"""


def with_former_defaults(loaded: dict[str, Any]) -> dict[str, Any]:
    """A run's settings, where they were written before ``ppo.step_kl`` or ``ppo.group_baseline``
    was a key, with what their absence and ``ppo.kl_in=null`` meant then."""
    ppo = loaded.get("ppo")
    if not isinstance(ppo, dict):
        return loaded
    if ppo.get("advantage", "gae") == "gae":
        ppo = {"group_baseline": False, **ppo}
    if "step_kl" in ppo:
        return {**loaded, "ppo": ppo}
    kl_in = ppo.get("kl_in") or ("loss" if ppo.get("advantage") == "grpo" else "reward")
    former = {"step_kl": None, "kl_in": kl_in, "lam": 0.95, "init_kl_coef": 0.05}
    return {**loaded, "ppo": {**former, **ppo, "kl_in": kl_in}}


def without_gone_keys(loaded: dict[str, Any]) -> dict[str, Any]:
    """A run's settings without the keys that are gone; these are logged."""
    settings = dict(loaded)
    for key, instead in GONE.items():
        section, _, last = key.rpartition(".")
        parent = settings.get(section) if section else settings
        if isinstance(parent, dict) and last in parent:
            log.info("%s of the run's configuration is ignored: %s", key, instead)
            rest = {name: value for name, value in parent.items() if name != last}
            settings = settings | {section: rest} if section else rest
    return settings
