"""Every configuration key is read somewhere in the program."""

from __future__ import annotations

import ast
import dataclasses
import typing
from pathlib import Path

import ppocli
from ppocli.config import schema

PACKAGE = Path(ppocli.__file__).parent
# these handle every key alike, so that naming one there doesn't mean that it has an effect
GENERIC = {"config/schema.py", "config/schema_model.py", "config/schema_ppo.py",
           "config/keys.py"}
SHOWING = ("cli/", "doctor", "export/", "report/")
"""rooms and files that print what was set; that alone is no use of a key"""


def sections(section: type = schema.TrainConfig, name: str = "") -> dict[str, list[str]]:
    """Section (its last name) -> its keys, for all sections."""
    hints = typing.get_type_hints(section)
    found = {name: [field.name for field in dataclasses.fields(section)]}
    for key, kind in hints.items():
        if dataclasses.is_dataclass(kind):
            for inner, keys in sections(kind, f"{name}.{key}".lstrip(".")).items():
                found[inner] = keys
    return found


def chain_of(node: ast.AST) -> tuple[str, ...]:
    """``cfg.ppo.optimizer.lr`` as a tuple of names; empty for anything else."""
    names: list[str] = []
    while isinstance(node, ast.Attribute):
        names.append(node.attr)
        node = node.value
    if not names or not isinstance(node, ast.Name):
        return ()
    return (node.id, *reversed(names))


CLASS_SECTIONS = {cls: name for name, cls in (
    ("", "TrainConfig"), ("model", "ModelConfig"), ("reward", "RewardConfig"),
    ("prompts", "PromptsConfig"), ("prompts.eval", "EvalPromptsConfig"),
    ("generation", "GenerationConfig"), ("ppo", "PPOConfig"), ("ppo.optimizer", "OptimizerConfig"),
    ("ppo.scheduler", "SchedulerConfig"), ("hardware", "HardwareConfig"))}
OVERLAYS = {"ppo.value_optimizer": "ppo.optimizer", "ppo.value_scheduler": "ppo.scheduler"}
"""sections laid over another one, key by key of the same name, by ``config/algorithm.py``"""


def reads(source: str) -> set[tuple[str, str]]:
    """(section, key) pairs that a module reads through attributes.

    A local name stands for a section where it was assigned one (``ppo = cfg.ppo``) or annotated
    with a section's class; a chain may also start anywhere (``session.cfg.ppo.gamma``).
    """
    known = sections()
    tree = ast.parse(source)
    found: set[tuple[str, str]] = set()
    for scope in scopes(tree):
        names = section_names(scope, known)
        for node in ast.walk(scope):
            chain = chain_of(node)
            if chain:
                found |= read_by(chain, names, known)
    return found


def scopes(tree: ast.Module) -> list[ast.AST]:
    return [node for node in ast.walk(tree)
            if isinstance(node, (ast.FunctionDef, ast.ClassDef))] or [tree]


def section_names(scope: ast.AST, known: dict[str, list[str]]) -> dict[str, str]:
    names: dict[str, str] = {}
    for node in ast.walk(scope):
        if isinstance(node, ast.arg) and node.annotation is not None:
            for part in ast.walk(node.annotation):
                if isinstance(part, ast.Name) and part.id in CLASS_SECTIONS:
                    names[node.arg] = CLASS_SECTIONS[part.id]
    for node in ast.walk(scope):
        targets: list[ast.expr] = []
        if isinstance(node, ast.Assign):
            targets = node.targets
        for target in targets:
            pairs = (zip(target.elts, node.value.elts, strict=True)
                     if isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple)
                     and len(target.elts) == len(node.value.elts) else [(target, node.value)])
            for name, value in pairs:
                section = section_of(chain_of(value), names, known)
                if isinstance(name, ast.Name) and section is not None:
                    names[name.id] = section
    return names


def section_of(chain: tuple[str, ...], names: dict[str, str], known: dict[str, list[str]]
               ) -> str | None:
    """The section that a chain ends in, or None."""
    for start, name in enumerate(chain):
        base = names.get(name) if start == 0 else None
        if base is None and name in ("cfg", "config") and (start or name not in names):
            base = ""
        if base is None:
            continue
        section = ".".join(filter(None, (base, *chain[start + 1:])))
        if section in known:
            return section
    return None


def read_by(chain: tuple[str, ...], names: dict[str, str], known: dict[str, list[str]]
            ) -> set[tuple[str, str]]:
    section = section_of(chain[:-1], names, known)
    return {(section, chain[-1])} if section is not None and chain[-1] in known[section] else set()


def by_name(source: str) -> set[str]:
    """Keys read as ``getattr(section, name)`` with names from a tuple of strings in that module."""
    tree = ast.parse(source)
    uses_getattr = any(isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
                       and node.func.id == "getattr" and not isinstance(node.args[1], ast.Constant)
                       for node in ast.walk(tree))
    if not uses_getattr:
        return set()
    return {item.value for node in ast.walk(tree) if isinstance(node, ast.Tuple)
            for item in node.elts if isinstance(item, ast.Constant) and isinstance(item.value, str)}


def strings_of(constant: str, source: str) -> set[str]:
    """The strings of a module's constant tuple."""
    value = next(node.value for node in ast.parse(source).body if isinstance(node, ast.Assign)
                 and isinstance(node.targets[0], ast.Name) and node.targets[0].id == constant)
    return set(ast.literal_eval(value))


def modules() -> dict[str, str]:
    return {name: path.read_text() for path in sorted(PACKAGE.rglob("*.py"))
            if (name := str(path.relative_to(PACKAGE))) not in GENERIC
            and not name.startswith(SHOWING)}


def dead_keys(sources: dict[str, str]) -> set[str]:
    found = {pair for source in sources.values() for pair in reads(source)}
    named = {module: by_name(source) for module, source in sources.items()}
    # sampling settings go through a list of names, as do the evaluation prompts' own keys
    lists = {"generation": "tasks/ppo/session.py", "generation.eval": "tasks/ppo/session.py"}
    if "in SAMPLING_KEYS" in sources["tasks/ppo/session.py"]:
        named["tasks/ppo/session.py"] |= strings_of("SAMPLING_KEYS",
                                                       sources["sampling/token_choice.py"])
    dead = set()
    for section, keys in sections().items():
        for key in keys:
            full = f"{section}.{key}".lstrip(".")
            if full in sections() or (section, key) in found:
                continue
            if key in named.get(lists.get(section, ""), set()):
                continue
            base = OVERLAYS.get(section)
            if (base, key) in found and f"**_given({section})" in sources["config/algorithm.py"]:
                continue
            dead.add(full)
    return dead


def test_every_key_is_read():
    assert dead_keys(modules()) == set()


def test_the_search_notices_keys_that_nothing_reads():
    """Renamed at every place that reads them, they have to turn up, and no others."""
    renamed = {".gamma": ".g", ".gradient_checkpointing": ".gc", '"top_k"': '"tk"',
               "cfg.top_k": "cfg.tk", ".stop_token_ids": ".ids", ".repeat": ".r"}
    sources = modules()
    for old, new in renamed.items():
        sources = {name: text.replace(old, new) for name, text in sources.items()}
    assert dead_keys(sources) == {
        "ppo.gamma", "model.gradient_checkpointing", "generation.top_k", "generation.eval.top_k",
        "generation.stop_token_ids", "prompts.eval.repeat"}
