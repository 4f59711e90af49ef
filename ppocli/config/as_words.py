"""Values and whole configurations as words of the command line, in the grammar of Hydra but without
Hydra: how a run can be started again by hand."""

from __future__ import annotations

import re
import shlex
from typing import Any

from ppocli.config.keys import free_mapping_of, key_for
from ppocli.config.resolved import config_differences
from ppocli.config.schema import TrainConfig

_PLAIN = re.compile(r"([A-Za-z_]|\.{0,2}/)[\w./:@+-]*", re.ASCII)
_YAML_WORDS = frozenset({"null", "true", "false", "inf", "nan", "none", "yes", "no", "on", "off"})


def quoted(text: str) -> str:
    """``text`` as a quoted string of Hydra's override grammar."""
    # backslashes are escapes only where they stand before the closing or an inner quote
    escaped = re.sub(r"(\\*)'", lambda m: m[1] * 2 + r"\'", text)
    return "'" + re.sub(r"(\\+)\Z", lambda m: m[1] * 2, escaped) + "'"


def literal(text: str) -> str:
    """:func:`quoted`, and ``${`` in it is text too, not an interpolation."""
    return quoted(re.sub(r"(\\*)\$\{", lambda m: m[1] * 2 + r"\${", text))


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


def training_command(config: TrainConfig, *more: str) -> str:
    """A command line for a POSIX shell that trains with ``config``; ``more`` words follow it."""
    words = [shlex.quote(word) for word in (*words_for(config), *more)]
    return " \\\n    ".join(["ppocli train", *words])


def _word(name: str, value: Any) -> str:
    if isinstance(value, str) and not _free(name):
        return f"{name}={value}" if _safe(value) else f"{name}={quoted(value)}"
    return f"{name}={_literal(value)}"


def _free(name: str) -> bool:
    """Whether any type fits there, so that only the spelling tells a text from a number."""
    key = key_for(name)
    return key is None or free_mapping_of(name) is not None


def _safe(value: str) -> bool:
    return bool(_PLAIN.fullmatch(value)) and value.lower() not in _YAML_WORDS


def _literal(value: Any) -> str:
    """A value in Hydra's override grammar."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, (int, float)):
        return repr(value)
    if isinstance(value, (list, tuple)):
        return "[" + ",".join(_literal(item) for item in value) + "]"
    if isinstance(value, dict):
        return "{" + ",".join(f"{_key(key)}:{_literal(item)}" for key, item in value.items()) + "}"
    text = str(value)
    return text if _safe(text) and ":" not in text else quoted(text)


def _key(key: Any) -> str:
    text = str(key)
    return text if re.fullmatch(r"[A-Za-z_]\w*", text) else quoted(text)
