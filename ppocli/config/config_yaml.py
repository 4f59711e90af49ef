"""A run's resolved ``config.yaml``: written once, read by workers and ``resume``; the changes that
a resume allows; and words that start the run again by hand."""

import copy
import dataclasses
import functools
import glob
import io
import json
import operator
import os
import re
import shlex
import typing
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml
from omegaconf import MISSING, DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from ppocli.builtin.names import BUILTIN_PREFIX
from ppocli.config import keys
from ppocli.config.keys import with_former_defaults, without_gone_keys
from ppocli.config.problems import range_problems
from ppocli.config.schema import TrainConfig
from ppocli.config.tasks import DATA_TASKS, is_read, task_name
from ppocli.config.text import did_you_mean, each_text, escaped, first_line
from ppocli.errors import CheckpointError

CONFIG_FILE = "config.yaml"
NEXT_CONFIG_FILE = "config.next.yaml"
"""settings for a resumed run; they replace config.yaml once it runs"""
PYTHON_OBJECT = "<python object>"
STARTED_FROM = "start"
"""folder in a run's folder for models that were passed as Python objects, which a resume needs"""
MODEL_KEYS = {"model": "model.path", "ref_model": "model.reference.path",
              "tokenizer": "model.tokenizer_path"}
"""the key whose place each of them takes"""
_LENGTH = ("ppo.total_episodes", "ppo.epochs", "ppo.num_steps", "ppo.num_rollouts",
           *(f"{name}.{key}" for name in DATA_TASKS
             for key in ("epochs", "num_updates", "mini_batch_size")))
"""keys that displays of a run calculate with"""


def schema_node() -> DictConfig:
    """The schema as a typed OmegaConf node whose free mappings accept new keys; a new copy for each
    caller."""
    return copy.deepcopy(_schema_node())


@functools.cache
def _schema_node() -> DictConfig:
    # a copy is made in a fraction of the time that OmegaConf takes for a node from dataclasses
    node = OmegaConf.structured(TrainConfig)
    for key in keys.schema_keys().values():
        if key.kind == "mapping":
            OmegaConf.set_struct(OmegaConf.select(node, key.name), False)
    return node


def typed(node: DictConfig) -> TrainConfig:
    """A composed node as plain dataclass instances; missing values stay ``???``.

    Raises:
        OmegaConfBaseException: an interpolation can't be resolved.
    """
    values = OmegaConf.to_container(node, resolve=True, throw_on_missing=False)
    return typing.cast(TrainConfig, _instance(TrainConfig, values))


def _instance(hint: Any, value: Any) -> Any:
    if not dataclasses.is_dataclass(hint):
        return value
    hints = typing.get_type_hints(hint)
    values = {name: _instance(hints[name], item) for name, item in value.items()}
    return typing.cast(type, hint)(**values)


def config_text(config: TrainConfig) -> str:
    """A configuration as YAML, in the key order of the schema, without sections that its task
    doesn't read.

    User paths should already be absolute (:func:`with_absolute_paths`).
    """
    return yaml_text({name: value for name, value in plain_values(config).items()
                      if is_read(name, task_name(config))})


def plain_values(config: TrainConfig) -> dict[str, Any]:
    """A configuration as nested mappings, from which OmegaConf reads the same values."""
    return typing.cast(dict[str, Any], each_text(dataclasses.asdict(config), escape_interpolations))


class _Dumper(yaml.SafeDumper):
    """Quotes texts that are texts in YAML 1.1 and numbers in OmegaConf, such as ``1e3``."""


_Dumper.add_implicit_resolver(  # as omegaconf's loader has it
    "tag:yaml.org,2002:float", re.compile(r"[-+]?[0-9][0-9_]*(\.[0-9_]*)?[eE][-+]?[0-9]+$"),
    list("-+0123456789"))


def yaml_text(values: Mapping[str, Any]) -> str:
    """Plain values as YAML, in their order, which OmegaConf reads back unchanged."""
    return yaml.dump(values, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=100)


def escape_interpolations(text: str) -> str:
    """``text`` in the form that OmegaConf reads back unchanged: ``${`` is text, not an
    interpolation."""
    return re.sub(r"(\\*)\$\{", lambda m: m[1] * 2 + r"\${", text)


def read_config(path: Path) -> TrainConfig:
    """Read a file written from :func:`config_text`.

    Raises:
        CheckpointError: the file is missing, damaged, or has keys or types that this version
            doesn't know.
    """
    fix = "give the folder of a run that ppocli made; its config.yaml must be unchanged"
    try:
        config = parsed(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(f"{path.parent} has no {path.name}: it is not a run folder",
                              where=str(path), fix=fix) from None
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
        raise CheckpointError(f"{path} can't be read: {' '.join(str(error).split())}",
                              where=str(path), fix=fix) from error
    except OmegaConfBaseException as error:
        name = str(error.full_key or "")
        hint = "" if keys.key_for(name) else did_you_mean(name, list(keys.schema_keys()))
        raise CheckpointError(
            f"{path} doesn't fit this version of ppocli: {name}: "
            f"{first_line(error.msg or error)}{hint}", where=str(path), fix=fix) from error
    wrong = "it holds no configuration" if config is None else next(
        map(str, range_problems(config, {}, _LENGTH)), None)
    if config is None or wrong:
        raise CheckpointError(f"{path} is damaged: {wrong}", where=str(path), fix=fix)
    return in_place(config, path.parent)


def in_place(config: TrainConfig, run_dir: Path) -> TrainConfig:
    """A copy of a run's configuration with the present paths of models that were passed as Python
    objects and lie in its folder."""
    places = {key: run_dir.resolve() / STARTED_FROM / name for name, key in MODEL_KEYS.items()}
    return with_values(config, {
        key: str(place) for key, place in places.items()
        if Path(operator.attrgetter(key)(config) or "").parts[-2:] == place.parts[-2:]
        and place.is_dir()})


@functools.lru_cache(maxsize=16)
def parsed(text: str) -> TrainConfig | None:
    """The configuration in the text of a config.yaml; None for an empty one.

    Cached, since a command reads its run's file in several places and parsing takes long.
    """
    try:
        loaded = OmegaConf.load(io.StringIO(text))
    except OmegaConfBaseException as error:  # such as half an interpolation
        raise yaml.YAMLError(str(error)) from error
    if not isinstance(loaded, DictConfig) or not loaded:
        return None
    settings = OmegaConf.to_container(loaded, resolve=False)
    each_text(settings, _refuse_interpolation)
    current = with_former_defaults(without_gone_keys(typing.cast(dict[str, Any], settings)))
    return typed(typing.cast(DictConfig, OmegaConf.merge(schema_node(), current)))


def _refuse_interpolation(text: str) -> str:
    """``text``, if it has no interpolation. To resolve one could read the environment, and put a
    secret of the reader's where the run's author wants it."""
    if match := re.search(r"(?<!\\)(?:\\\\)*(\$\{.*)", text, re.DOTALL):
        raise yaml.YAMLError(f"{match[1]!r} is an interpolation, and a run's configuration holds "
                             "plain values only")
    return text


def with_values(config: TrainConfig, values: Mapping[str, Any]) -> TrainConfig:
    """A copy with new values at some dotted keys of the schema."""
    # on plain values: OmegaConf would take a ${ in them for an interpolation once more
    result = copy.deepcopy(config)
    for name, value in values.items():
        section, _, last = name.rpartition(".")
        setattr(operator.attrgetter(section)(result) if section else result, last, value)
    return result


def with_absolute_paths(config: TrainConfig) -> TrainConfig:
    """A copy whose user paths, relative to the current folder, are absolute, so that the run can go
    on from any folder.

    Names that could also be Hub names (``gpt2``, ``org/name``) count as paths only if a file or
    folder of that name exists, or if they start with ``.``, ``/`` or ``~``.
    """
    def those(what: str) -> list[tuple[str, Any]]:
        names = [name for name, key in keys.schema_keys().items() if key.metadata["holds"] == what]
        return [(name, operator.attrgetter(name)(config)) for name in names]

    return with_values(config, {
        **{key: _absolute(value, key == "output_dir") for key, value in those("path")
           if isinstance(value, str) and value != MISSING},
        **{key: _absolute_rows(value) for key, value in those("rows") if isinstance(value, str)},
        **{key: _absolute_function(value) for key, value in those("code")},
        **{key: _absolute_values(value) for key, value in those("arguments")},
        "reward.fns": {
            name: {**entry, "fn": _absolute_function(entry.get("fn")),
                   "kwargs": _absolute_values(entry.get("kwargs") or {})}
            if isinstance(entry, dict) else entry for name, entry in config.reward.fns.items()},
        "prompts.mix": {
            name: {**entry, "path": _absolute_rows(entry["path"])}
            if isinstance(entry, dict) and entry.get("path") else entry
            for name, entry in config.prompts.mix.items()}})


def _absolute_rows(value: str | list[str]) -> str:
    return keys.joined_paths([_absolute(each, "://" not in each and glob.has_magic(each))
                              for path in keys.several(value) for each in keys.row_paths(path)])


def _absolute(value: str, always: bool = False) -> str:
    if value == "" or value.startswith(BUILTIN_PREFIX) or value == PYTHON_OBJECT:
        return value
    path = Path(value).expanduser()
    is_path = always or value.startswith((".", "/", "~")) or path.exists()
    return os.path.abspath(path) if is_path else value


def _absolute_function(value: Any) -> Any:
    """``rewards.py:score`` with an absolute file, or several such paths; module paths and other
    texts unchanged."""
    if isinstance(value, list):
        return [_absolute_function(each) for each in value]
    if value is None:
        return None
    file, colon, name = value.rpartition(":")
    return f"{_absolute(file, True)}{colon}{name}" if file.endswith(".py") else value


def _absolute_values(value: Any, name: str = "") -> Any:
    """Arguments of user code with absolute paths, also in lists and mappings. Texts with a
    separator that exist on disk are paths, and so is a ``model`` that is a folder."""
    if isinstance(value, dict):
        return {key: _absolute_values(each, key) for key, each in value.items()}
    if isinstance(value, list):
        return [_absolute_values(each) for each in value]
    is_path = isinstance(value, str) and ("/" in value or value.startswith("~") or (
        name == "model" and Path(value).is_dir()))
    return _absolute(value) if is_path else value


def flat(config: TrainConfig) -> dict[str, Any]:
    """Dotted key -> value for every leaf; free mappings give one entry per key in them."""
    return dict(leaves("", dataclasses.asdict(config)))


def leaves(prefix: str, values: Mapping[Any, Any]) -> Iterator[tuple[str, Any]]:
    """(dotted key, value) of nested mappings, down to the keys of the schema and those of its free
    mappings."""
    for name, value in values.items():
        key = f"{prefix}{name}"
        schema_key = keys.schema_keys().get(key)
        descend = schema_key is None or (schema_key.kind == "mapping" and bool(value))
        if isinstance(value, dict) and descend and keys.free_mapping_of(key) is None:
            yield from leaves(f"{key}.", value)
        else:
            yield key, value


def next_config(run_dir: Path) -> Path:
    """The configuration file for the next start of a run: that of a resume, else its own."""
    path = run_dir / NEXT_CONFIG_FILE
    return path if path.is_file() else run_dir / CONFIG_FILE


def accept_config(run_dir: Path) -> None:
    """Make the configuration of a resume, if there is one, the run's own."""
    if (path := run_dir / NEXT_CONFIG_FILE).is_file():
        os.replace(path, run_dir / CONFIG_FILE)


_PLAIN_TEXT = re.compile(r"([A-Za-z_]|\.{0,2}/)[\w./:@+-]*", re.ASCII)
_YAML_WORDS = frozenset({"null", "true", "false", "inf", "nan", "none", "yes", "no", "on", "off"})

# where the run lies and how it was started: not part of what it computes
_PLACE = frozenset({"run_name", "output_dir", "resume"})


def config_differences(old: TrainConfig, new: TrainConfig) -> list[tuple[str, Any, Any]]:
    """(key, old value, new value) for every key that differs, in the order of the schema.

    Where the run lies (``run_name``, ``output_dir``) and ``resume`` itself are left out.
    """
    before, after = flat(old), flat(new)
    return [(key, before.get(key), after.get(key)) for key in dict.fromkeys([*before, *after])
            if key not in _PLACE and before.get(key) != after.get(key)
            # an empty free mapping on one side only says that its keys, listed apart, came or went
            and ((key in before and key in after) or keys.free_mapping_of(f"{key}.x") != key)]


# As words, in Hydra's grammar but without Hydra ---------------------------------------------------

def quoted(text: str) -> str:
    """``text`` as a quoted string of Hydra's override grammar."""
    # backslashes are escapes only where they stand before the closing or an inner quote
    escaped = re.sub(r"(\\*)'", lambda m: m[1] * 2 + r"\'", text)
    return "'" + re.sub(r"(\\+)\Z", lambda m: m[1] * 2, escaped) + "'"


def literal(text: str) -> str:
    """:func:`quoted`, and ``${`` in it is text too, not an interpolation."""
    return quoted(escape_interpolations(text))


def unquoted(text: str) -> str:
    """``text`` without the one pair of quotes around it and their escapes, if it has them."""
    if len(text) < 2 or text[0] != text[-1] or text[0] not in "'\"":
        return text
    return re.sub(rf"(\\+)(?={text[0]}|\Z)", lambda m: "\\" * (len(m[1]) // 2), text[1:-1])


def words_for(config: TrainConfig) -> list[str]:
    """The settings that differ from the defaults, as words of ``ppocli train``.

    ``run_name``, ``output_dir`` and ``resume``, which say where a run lies, are left out.
    Composing the words gives ``config`` back.
    """
    return [_word(name, new) for name, _, new in config_differences(TrainConfig(), config)]


def mapping_words(values: Mapping[str, Any], within: str = "") -> list[str]:
    """A nested mapping of settings as words of ``ppocli train``: ``{"ppo": {"n": 2}}`` becomes
    ``ppo.n=2``. Keys that take a mapping (``reward.kwargs``) get it whole."""
    words: list[str] = []
    for key, value in values.items():
        name = f"{within}{key}"
        free = name in keys.schema_keys() and keys.schema_keys()[name].kind == "mapping"
        words += (mapping_words(value, f"{name}.") if isinstance(value, Mapping) and not free
                  else [_word(name, dict(value) if free and value is not None else value)])
    return words


def training_command(config: TrainConfig, *more: str) -> str:
    """A command line for a POSIX shell that trains with ``config`` and the words ``more``."""
    words = [shlex.quote(word) for word in (*words_for(config), *more)]
    return " \\\n    ".join(["ppocli train", *words])


def _word(name: str, value: Any) -> str:
    if keys.takes_escapes(name):
        value = each_text(value, escaped)
    return f"{name}={value if isinstance(value, str) and _safe(value) else literal_value(value)}"


def _safe(value: str) -> bool:
    return bool(_PLAIN_TEXT.fullmatch(value)) and value.lower() not in _YAML_WORDS


def literal_value(value: Any, quote: Callable[[str], str] = literal) -> str:
    """A value in Hydra's override grammar; ``quote`` as :func:`quoted` or :func:`literal`."""
    if value is None or isinstance(value, bool):
        return json.dumps(value)
    if isinstance(value, (int, float)):
        return repr(value)
    if isinstance(value, (list, tuple)):
        return "[" + ",".join(literal_value(item, quote) for item in value) + "]"
    if isinstance(value, dict):
        return "{" + ",".join(f"{_key(key)}:{literal_value(item, quote)}"
                              for key, item in value.items()) + "}"
    text = str(value)
    return text if _safe(text) and ":" not in text else quote(text)


def _key(key: Any) -> str:
    text = str(key)
    return text if re.fullmatch(r"[A-Za-z_]\w*", text) else quoted(text)
