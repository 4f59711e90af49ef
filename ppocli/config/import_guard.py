"""The import paths that a configuration may name: the user's code, packages that offer rewards, and
ppocli's. All others have to be typed on the command line.

People share recipes as data, and ``reward.fn: numpy:load`` with chosen arguments would make a
recipe a program. The object's own module is checked too, since another may have imported it.

Also here: the current folder, with the user's code, as a place that Python imports from.
"""

import ast
import importlib.util
import os
import site
import sys
import sysconfig
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from functools import cache
from importlib import metadata
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import FrameType, ModuleType

ENTRY_POINTS = "ppocli.rewards"
"""group of entry points by which an installed package allows configurations to name it"""
TRUST = "--trust"
"""the option that allows the code that somebody else's run names"""
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


def refuse_other_neighbours(path: Path, refused: Callable[..., Exception]) -> None:
    """Refuse a user's file whose import of a neighbour would get a module of the same name from
    another folder, since Python keeps one module per name.

    Args:
        refused: makes the error.
    """
    others = {os.path.dirname(str(module.__file__)) for name, module in list(sys.modules.items())
              if name.startswith("_ppocli_user_")} - {str(path.parent)}
    for node in ast.walk(ast.parse(path.read_bytes(), str(path))) if others else ():
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names = [node.module]
        for name in (name.partition(".")[0] for name in names):
            file = getattr(sys.modules.get(name), "__file__", None) or ""
            if os.path.dirname(file) in others and path.with_name(f"{name}.py").is_file():
                raise refused(f"{path} imports {name}, which is loaded already, from {file}.",
                              fix="rename one of the two files, and its imports")


def join_working_directory() -> None:
    """Put the current folder at the end of ``sys.path``, once, for imports of the user's code. Its
    files neither hide libraries nor replace missing ones."""
    here = os.getcwd()
    if here not in sys.path and "" not in sys.path:
        sys.path.append(here)
    sys.meta_path[:] = [_Finder if finder is PathFinder else finder for finder in sys.meta_path]


class _Finder(PathFinder):
    """Finds modules on ``sys.path`` as Python does, but none in the current folder for an installed
    library: some look for optional libraries (peft for bitsandbytes)."""

    @classmethod
    def find_spec(cls, fullname: str, path: Sequence[str] | None = None,
                  target: ModuleType | None = None) -> ModuleSpec | None:
        """As ``PathFinder.find_spec``."""
        if path is None and _imports_for_library():
            here = os.getcwd()
            path = [place for place in sys.path if place not in ("", here)]
        return PathFinder.find_spec(fullname, path, target)


def _imports_for_library() -> bool:
    """Whether an installed library, not ppocli or the user's code, is importing something now."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and "importlib" in frame.f_code.co_filename:
        frame = frame.f_back
    file = "" if frame is None else frame.f_code.co_filename
    return {"site-packages", "dist-packages"} & {*Path(file).parts} != set() and not Path(
        file).is_relative_to(os.path.dirname(__file__))
