"""Writes docs/configuration.md from the schema, the only home of keys, defaults and ranges.

    python docs/make_configuration.py > docs/configuration.md
"""

import dataclasses
import json
import sys
import typing
from typing import Any

from omegaconf import MISSING

from ppocli.builtin.names import shipped
from ppocli.config.keys import Key, doc_of, schema_keys
from ppocli.config.schema import TrainConfig

HEAD = """\
# Configuration keys

<!-- Written by docs/make_configuration.py from ppocli/config/schema.py; do not edit. -->

Every setting of a run is a word `KEY=VALUE` on the command line, a line of a recipe, or an item of
the list that `ppocli.train` takes. Unknown keys and values out of range are refused before anything
is loaded, all at once, each with the nearest name. `null` means "not set", and the table says what
holds then.

```console
$ ppocli train --cfg job +recipe=quickstart
$ ppocli train --cfg job +recipe=quickstart -p ppo
$ ppocli train --cfg job +recipe=quickstart seed=1 ppo.optimizer.lr=1e-4
```

Lists are written `[a,b]`, mappings take keys one by one (`reward.kwargs.words=[great,moving]`). In
a shell, quote words with brackets, spaces or braces: `'prompts.items=[Once upon a time]'`.

A **step** is one rollout and the updates made from it; keys, folders and metrics that say step
count these. Gradient updates are **updates**.
"""

GROUPS = """\
## Config groups

A group's option sets several keys of its section at once; single keys are then changed behind it,
as in `ppocli train +recipe=quickstart ppo=trlx ppo.optimizer.lr=1e-4`.

| word | what it sets |
|---|---|
"""


LIKE = {"prompts.eval": "prompts", "generation.eval": "generation", "ppo.ptx.data": "data",
        "ppo.value_optimizer": "ppo.optimizer", "sft.optimizer": "ppo.optimizer",
        "reward_model.optimizer": "ppo.optimizer", "ppo.value_scheduler": "ppo.scheduler",
        "sft.scheduler": "ppo.scheduler", "reward_model.scheduler": "ppo.scheduler"}
"""section -> the section whose keys it repeats; only what differs has a row"""


SHORT = {"a whole number": "integer", "whole numbers": "integers", "a number": "number",
         "true or false": "boolean", "a list of": "list of", "a mapping": "mapping"}
"""types in messages -> in the tables"""


def cell(text: str) -> str:
    """Text that can stand in a Markdown table."""
    return text.replace("|", "\\|").replace("\n", " ")


def shown_default(key: Key) -> str:
    if key.default == MISSING:
        return "**must be given**"
    if key.default is None:
        return "null"
    return f"`{json.dumps(key.default)}`" if not isinstance(key.default, str) \
        else f"`{key.default}`"


def key_row(key: Key) -> str:
    values = key.expected + (f", {key.allowed}" if key.allowed else "")
    if key.metadata.get("choices"):
        values = " ".join(f"`{choice}`" for choice in key.metadata["choices"])
        values += " or an import path" if key.metadata["import_path"] else ""
        values += " or null" if key.optional else ""
    if key.default is None:  # which says that it may be null
        values = values.replace(", or null", "").replace(" or null", "")
    for long, short in SHORT.items():
        values = values.replace(long, short)
    return f"| `{key.name}` | {shown_default(key)} | {cell(values)} | {cell(key.doc)} |"


def sections(schema: type, prefix: str = "", doc: str = "") -> list[tuple[str, str, list[Key]]]:
    """(dotted name, meaning, leaf keys) of the schema and of every section in it, in order."""
    hints = typing.get_type_hints(schema)
    own: list[Key] = []
    inner: list[tuple[str, str, list[Key]]] = []
    for field in dataclasses.fields(schema):
        name, hint = prefix + field.name, hints[field.name]
        if dataclasses.is_dataclass(hint):
            inner += sections(typing.cast(Any, hint), name + ".", doc_of(schema, field.name))
        else:
            own.append(schema_keys()[name])
    return [(prefix.rstrip("."), doc, own), *inner]


def group_rows() -> list[str]:
    rows = []
    for folder in sorted(path for path in shipped("conf").iterdir() if path.is_dir()):
        for file in sorted(folder.glob("*.yaml")):
            about = next(line for line in file.read_text(encoding="utf-8").splitlines()
                         if "@package" not in line).lstrip("# ")
            rows.append(f"| `{folder.name}={file.stem}` | {cell(about)} |")
    return rows


def repeats(key: Key, other: str) -> bool:
    """Whether a key has the meaning of its namesake in the section ``other``, and the same default
    or null; keys of evaluations that are null take their namesake's value."""
    like = schema_keys().get(f"{other}.{key.name.rpartition('.')[2]}")
    inherits = key.default is None and ".eval." in key.name
    return like is not None and (inherits or (
        key.doc == like.doc and key.default in (None, like.default)))


def page() -> str:
    """The whole page."""
    parts = [HEAD]
    for name, doc, keys in sections(TrainConfig):
        lines = [f"## `{name}`: {doc}" if name else "## The run", ""]
        other = LIKE.get(name)
        if other:
            same = [key for key in keys if repeats(key, other)]
            names = ", ".join(f"`{key.name.rpartition('.')[2]}`" for key in same)
            null = all(key.default is None for key in same)
            values = ", and by default its values" if null else ""
            lines += [f"As in `{other}`{values}: {names}.", ""]
        rows = [key_row(key) for key in keys if not (other and repeats(key, other))]
        if rows:
            lines += ["| key | default | values | meaning |", "|---|---|---|---|", *rows, ""]
        parts.append("\n".join(lines))
    parts.append(GROUPS + "\n".join(group_rows()) + "\n")
    return "\n".join(parts)


if __name__ == "__main__":
    sys.stdout.write(page())
