"""Names in the package say the quantity, not that something was found or told; those of ``ppocli``
itself are what it says, whichever of its parts is loaded."""

import ast
import importlib
import pkgutil
from collections.abc import Iterator
from pathlib import Path

import ppocli

NOT_NAMES = {
    "found", "own", "there", "told", "said", "given", "drawn", "which", "mine", "asked", "beside",
    "apart", "dealt", "woven", "wanted", "taken", "some", "known", "spoken", "hit"}


def named(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """(line, name) of every variable, parameter, attribute, function and class that is made."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.lineno, node.id if isinstance(node, ast.Name) else node.attr
        elif isinstance(node, ast.arg):
            yield node.lineno, node.arg
        elif isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node.lineno, node.name


def test_names_say_the_quantity():
    package = Path(ppocli.__file__).parent
    assert [f"{path.relative_to(package)}:{line} {name}" for path in sorted(package.rglob("*.py"))
            for line, name in named(ast.parse(path.read_text(encoding="utf-8")))
            if name.strip("_") in NOT_NAMES] == []


def test_no_room_hides_a_public_name():
    """A package ``ppocli.train`` would take the place of the function once it is imported."""
    assert {name for _, name, _ in pkgutil.iter_modules(ppocli.__path__)}.isdisjoint(ppocli.__all__)
    for name in ppocli.__all__:
        assert callable(getattr(importlib.import_module("ppocli"), name)) or name == "__version__"
