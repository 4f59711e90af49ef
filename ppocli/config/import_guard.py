"""The import paths that a configuration may name: the user's code, packages that offer rewards, and
ppocli's. All others have to be typed on the command line.

People share recipes as data, and ``reward.fn: numpy:load`` with chosen arguments would make a
recipe a program. The object's own module is checked too, since another may have imported it.

Also here: the current folder, with the user's code, as a place that Python imports from; and
optional libraries: whether they are installed, and the extra of ppocli that installs each.
"""

import importlib.util
import os
import site
import sys
import sysconfig
from collections.abc import Iterable
from contextlib import suppress
from functools import cache
from importlib import metadata
from pathlib import Path

from ppocli.config.schema_run import TRACKERS
from ppocli.errors import InputError

ENTRY_POINTS = "ppocli.rewards"
"""group of entry points by which an installed package allows configurations to name it"""
TRUST = "--trust"
"""the option that allows the code that somebody else's run names"""
EXTRAS = {"bitsandbytes": "8bit", "matplotlib": "plot", "optuna": "sweep", "peft": "peft",
          "starlette": "serve", "uvicorn": "serve", "math_verify": "math", "reasoning_gym": "gym",
          **{name: name for name in (*TRACKERS, "openenv")}}
"""name to import -> extra"""
LAUNCHERS = {"joblib": "sweep", "submitit_local": "sweep", "submitit_slurm": "sweep", "ray": "ray"}
"""option of hydra/launcher -> extra"""
limited: set[str] = set()
"""the import paths of the last call of :func:`limit`"""


def limit(specs: Iterable[str]) -> None:
    """Restrict these import paths, which a configuration names, to code that it may name."""
    limited.clear()
    limited.update(specs)


def may_name(module: str | None, file: str | None) -> bool:
    """Whether a configuration may name the code in a module.

    Args:
        module: dotted name; None for a file alone.
        file: the module's file; None: it is looked for, without importing anything.
    """
    top = (module or "").partition(".")[0]
    if top in _offering():
        return True
    file = file or _source_of(top)
    return file is not None and _is_user_file(file)


def _source_of(package: str) -> str | None:
    """The file or folder of a top-level package or module; None if it isn't found."""
    with suppress(ImportError, ValueError):
        if (spec := importlib.util.find_spec(package)) is not None:
            return next(iter(spec.submodule_search_locations or ()), spec.origin)
    return None


def _is_user_file(file: str) -> bool:
    """Whether a file lies in the current folder, outside any Python environment in it."""
    real = Path(os.path.realpath(file))
    if any(map(real.is_relative_to, _installed())) or \
            {"site-packages", "dist-packages"} & {*real.parts}:
        return False
    return Path(os.path.abspath(file)).is_relative_to(os.getcwd()) \
        or real.is_relative_to(os.path.realpath(os.getcwd()))


@cache
def _installed() -> frozenset[str]:
    """Folders of Python's own modules and of installed packages."""
    places = [*map(sysconfig.get_path, ("stdlib", "platstdlib", "purelib", "platlib")),
              *site.getsitepackages(), os.path.dirname(__file__)]
    return frozenset(os.path.realpath(place) for place in places if place)


@cache
def _offering() -> frozenset[str]:
    """Top-level packages with an entry point in the group."""
    return frozenset(entry.module.partition(".")[0]
                     for entry in metadata.entry_points(group=ENTRY_POINTS))


def join_working_directory() -> None:
    """Put the current folder at the end of ``sys.path``, once, for imports of the user's code. Its
    files neither hide libraries nor replace missing ones."""
    here = os.getcwd()
    if here not in sys.path and "" not in sys.path:
        sys.path.append(here)


def installed(library: str) -> bool:
    """Whether a library can be imported. A file or folder of its name in the current folder, such
    as wandb creates for its files, is no library."""
    spec = importlib.util.find_spec(library)
    if spec is None or spec.origin is None:
        return False
    folder = Path(spec.origin).parents[bool(spec.submodule_search_locations)]
    return os.path.realpath(folder) != os.path.realpath(os.getcwd())


def pip_line(library: str) -> str:
    """The command that installs a library."""
    return f"pip install 'ppocli[{EXTRAS[library]}]'" if library in EXTRAS else (
        f"pip install {library}")


def missing(library: str, need: str, where: str) -> InputError | None:
    """The error for a library that isn't installed; None if it is.

    Args:
        need: the feature that needs it, the subject of the message.
        where: the key or file that turns the feature on.
    """
    return None if installed(library) else InputError(
        f"{need} needs {library}, which is not installed.", where=where, fix=pip_line(library),
        code="not-installed")


def require(library: str, need: str, where: str) -> None:
    """Raise the error of :func:`missing`, if there is one.

    Raises:
        InputError: the library isn't installed.
    """
    if error := missing(library, need, where):
        raise error
