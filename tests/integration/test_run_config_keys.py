"""Every configuration key is read somewhere in the program."""

from __future__ import annotations

import ast
from pathlib import Path

import ppocli
from ppocli.config.keys import schema_keys

PACKAGE = Path(ppocli.__file__).parent
# these handle every key alike, so that naming one there doesn't mean that it has an effect
GENERIC = {"config/schema.py", "config/schema_ppo.py", "config/keys.py"}
SHOWING = ("cli/", "doctor", "export/", "report/")
"""rooms and files that print what was set; that alone is no use of a key"""


def modules() -> dict[str, str]:
    return {name: path.read_text() for path in sorted(PACKAGE.rglob("*.py"))
            if (name := str(path.relative_to(PACKAGE))) not in GENERIC
            and not name.startswith(SHOWING)}


def dead_keys(sources: dict[str, str]) -> set[str]:
    """Keys whose last name is neither an attribute that is read nor a text, which ``getattr`` may
    be given, in any module."""
    read = set()
    for source in sources.values():
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
                read.add(node.attr)
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                read.add(node.value)
    return {name for name in schema_keys() if name.rpartition(".")[2] not in read}


def test_every_key_is_read():
    assert dead_keys(modules()) == set()


def test_the_search_notices_keys_that_nothing_reads():
    """Renamed at every place that reads them, they have to turn up, and no others."""
    renamed = {".gamma": ".g", ".gradient_checkpointing": ".gc", '"top_k"': '"tk"',
               ".top_k": ".tk"}
    sources = modules()
    for old, new in renamed.items():
        sources = {name: text.replace(old, new) for name, text in sources.items()}
    assert dead_keys(sources) == {"ppo.gamma", "model.gradient_checkpointing", "generation.top_k",
                                  "generation.eval.top_k"}
