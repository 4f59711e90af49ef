"""Which import paths a configuration may name: code of the user's own, of packages that offer
rewards, and ours. Everything else has to be typed on the command line.

A recipe is passed on as data, and ``reward.fn: numpy:load`` with arguments of its own choice would
make it a program. Checked where a path is followed, for what it leads to may be another module's.
"""

import importlib.util
import os
import site
import sysconfig
from collections.abc import Iterable
from contextlib import suppress
from functools import cache
from importlib import metadata
from pathlib import Path

ENTRY_POINTS = "ppocli.rewards"
"""group of entry points with which an installed package says that it is made for configurations"""
TRUST = "--trust"
"""the option with which a person says that somebody else's run may run what it names"""
limited: set[str] = set()
"""import paths that :func:`limit` was told last"""


def limit(specs: Iterable[str]) -> None:
    """From now on these import paths, which a configuration names, lead to such code alone."""
    limited.clear()
    limited.update(specs)


def may_name(module: str | None, file: str | None) -> bool:
    """Whether a configuration may name what lies in a module.

    Args:
        module: dotted name; None for a file that is no module's.
        file: that it is read from; None: it is looked for, without importing anything.
    """
    top = (module or "").partition(".")[0]
    if top in _offering():
        return True
    file = file or _source_of(top)
    return file is not None and _is_own_file(file)


def _source_of(package: str) -> str | None:
    """The file or folder of an outermost package or module."""
    with suppress(ImportError, ValueError):
        if (spec := importlib.util.find_spec(package)) is not None:
            return next(iter(spec.submodule_search_locations or ()), spec.origin)
    return None


def _is_own_file(file: str) -> bool:
    """Whether a file lies under the current folder, and not in an environment that lies there."""
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
    """Outermost packages of what is declared in the group."""
    return frozenset(entry.module.partition(".")[0]
                     for entry in metadata.entry_points(group=ENTRY_POINTS))
