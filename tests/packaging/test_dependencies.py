"""What the code imports is declared, what is declared is imported, and every configuration key is
read somewhere."""

import ast
import functools
import sys
import tomllib
from importlib.metadata import packages_distributions
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import ppocli
from ppocli.config.keys import schema_keys
from tools.oldest import oldest

ROOT = Path(__file__).resolve().parents[2]


def imported(folder: Path) -> dict[str, set[str]]:
    """Top-level module -> files that import it; Python's own and relative imports left out."""
    found: dict[str, set[str]] = {}
    for file in folder.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.level == 0:
                names = [node.module or ""]
            else:
                continue
            for name in names:
                found.setdefault(name.partition(".")[0], set()).add(str(file.relative_to(ROOT)))
    return {name: files for name, files in found.items()
            if name not in sys.stdlib_module_names and name != "ppocli"}


def declared(*extras: str) -> set[str]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    texts = list(project["dependencies"])
    for extra in extras:
        texts += project["optional-dependencies"][extra]
    return {canonicalize_name(Requirement(text).name) for text in texts}


all_distributions = functools.cache(packages_distributions)


def distributions_of(module: str) -> set[str]:
    return {canonicalize_name(name) for name in all_distributions().get(module, [])}


OPTIONAL = {"matplotlib": "plot", "peft": "peft", "bitsandbytes": "8bit", "wandb": "wandb",
            "trackio": "trackio", "optuna": "sweep", "starlette": "serve", "uvicorn": "serve",
            "math_verify": "math", "reasoning_gym": "gym", "openenv": "openenv"}
"""what only an extra brings; imported inside functions, which say how to get it"""


def test_every_imported_library_is_a_declared_dependency():
    undeclared = {module: sorted(files) for module, files in imported(ROOT / "ppocli").items()
                  if not distributions_of(module) & declared()}
    assert set(undeclared) == set(OPTIONAL)
    for module, extra in OPTIONAL.items():
        # what is not installed here goes by its module's name
        assert (distributions_of(module) or {canonicalize_name(module)}) & declared(extra)


def test_every_declared_dependency_is_imported():
    used = {name for module in imported(ROOT / "ppocli") for name in distributions_of(module)}
    assert declared() - used == set()


PACKAGE = Path(ppocli.__file__).parent
# these handle every key alike, so that naming one there doesn't mean that it has an effect
GENERIC = {"config/schema.py", "config/schema_run.py", "config/schema_training.py",
           "config/keys.py"}
SHOWING = ("cli/", "export/", "report/")
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


def test_the_oldest_of_every_bound_is_within_it():
    found, project = oldest(), tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    for one in map(Requirement, project["dependencies"]):
        assert one.specifier.contains(found[one.name])
