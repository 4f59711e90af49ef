"""Code of the user's own: from an import path to the object it names, and words for messages about
it: where it lies, where it raised, what a text looked like.

Only code of the user's own or of an installed third-party package is accepted: a shared recipe
names Python that will run, so ``os:system`` and everything else of the standard library is refused.
"""

from __future__ import annotations

import functools
import hashlib
import importlib
import importlib.util
import inspect
import os
import pkgutil
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

from ppocli.config.secrets import hide_secrets
from ppocli.errors import PpocliError
from ppocli.text import error_line, short_path, suggestion

SHOWN_CHARS = 100
"""longest piece of a sample that a message shows"""


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of user code, for messages about a path to it."""

    noun: str
    """``function`` or ``class``"""
    error: type[PpocliError]
    """what is raised where the path leads to nothing that can be used"""
    short_names: Mapping[str, str] = field(default_factory=dict)
    """names of what ships with ppocli, and the import path of each"""


@dataclass(frozen=True, slots=True)
class Wanted:
    """What a key asks for."""

    spec: str
    """as the user wrote it"""
    key: str
    """config key it came from, such as ``reward.fn``"""
    kind: Kind

    @property
    def forms(self) -> str:
        """The forms that a path may have."""
        return ", ".join(form + self.kind.noun for form in (
            "pkg.module:", "pkg.module.", "path/to/file.py:"))

    def refused(self, what: str, *, fix: str, where: str | None = None) -> PpocliError:
        """The error that says why the path won't do."""
        return self.kind.error(what, where=where or self.key, fix=fix)


@dataclass(frozen=True, slots=True)
class Located:
    """A callable that a key names, before anything is bound to it."""

    spec: str
    """as the user wrote it"""
    key: str
    """config key it came from, such as ``reward.fn``"""
    target: Callable[..., Any]
    """function, class or callable object"""
    file: str | None
    """source file, for ``running code from FILE``"""
    line: int | None

    @property
    def label(self) -> str:
        """``my_rewards:score (my_rewards.py:12)``"""
        if self.file is None:
            return self.spec
        return f"{self.spec} ({short_path(self.file)}:{self.line})"

    @property
    def needs_all_samples(self) -> bool:
        """Whether the function or class has a true attribute of that name: with several ranks it
        wants one call on one of them, with the samples of all."""
        return bool(getattr(self.target, "needs_all_samples", False))


def locate(wanted: Wanted) -> Located:
    """Import what is wanted: ``pkg.module:function``, ``pkg.module.function``,
    ``path/to/file.py:function`` or a short name. A class, a nested attribute or a callable object
    will do as well.

    Raises:
        PpocliError: of the wanted kind: no such module, file or attribute; an error inside the
            module; something that can't be called; or code of the standard library.
    """
    path = wanted.kind.short_names.get(wanted.spec, wanted.spec)
    join_working_directory()
    if ":" in path:
        source, _, attribute = path.rpartition(":")
        is_file = source.endswith(".py") or os.sep in source
        module = _load_file(source, wanted) if is_file else _load_module(source, wanted)
    elif path.endswith(".py"):
        raise _no_function(wanted)
    elif "." in path:
        module, attribute = _split_dotted(path, wanted)
    else:
        raise _no_module(path, wanted)
    if not attribute:
        raise _no_function(wanted)
    return from_object(_attribute(module, attribute, wanted), wanted)


def build(wanted: Wanted, *given: Any, kwargs: Mapping[str, Any], key: str) -> Any:
    """What comes of calling what ``wanted`` names.

    Args:
        given: what we hand over.
        kwargs: the user's further arguments.
        key: that holds ``kwargs``, for messages.

    Raises:
        PpocliError: as :func:`locate`; or it doesn't take these arguments.
    """
    target = locate(wanted).target
    try:
        inspect.signature(target).bind(*given, **kwargs)
    except TypeError as error:
        raise wanted.refused(f"{wanted.spec} can't be called with what it would get: {error}.",
                             where=f"{wanted.key}, {key}",
                             fix="it gets one argument from ppocli, and those of "
                             f"{key}={dict(kwargs)} by name") from error
    return target(*given, **kwargs)


def from_object(target: Any, wanted: Wanted) -> Located:
    """Check a Python object as :func:`locate` does and note where its code lies.

    Raises:
        PpocliError: it can't be called, or belongs to the standard library.
    """
    if not callable(target):
        raise wanted.refused(
            f"{wanted.spec!r} is of type {type(target).__name__}, which can't be called.",
            fix="name a function, a class or a callable object")
    _refuse_standard_library(target, wanted)
    file, line = code_home(target)
    return Located(wanted.spec, wanted.key, target, file, line)


def join_working_directory() -> None:
    """Put the current folder in front of ``sys.path``, once, as ``python -m`` does."""
    here = os.getcwd()
    if here not in sys.path and "" not in sys.path:
        sys.path.insert(0, here)


def _is_standard(module_name: str | None) -> bool:
    return (module_name or "").partition(".")[0] in sys.stdlib_module_names


def _refuse_standard_library(target: Any, wanted: Wanted) -> None:
    while isinstance(target, functools.partial):
        target = target.func
    if not inspect.isroutine(target):
        target = inspect.unwrap(target)
    owner = target if inspect.isroutine(target) or inspect.isclass(target) else type(target)
    module_name = getattr(owner, "__module__", None)
    if module_name is None:  # methods of built-in types carry no module
        module_name = type(getattr(owner, "__self__", owner)).__module__
    if _is_standard(module_name):
        raise _standard_library_error(wanted, f"it is part of Python's {module_name!r}")


def _standard_library_error(wanted: Wanted, why: str) -> PpocliError:
    return wanted.refused(
        f"{wanted.spec!r} is refused: {why}, and a configuration may not run the standard library.",
        fix=f"name a {wanted.kind.noun} of your own; a module of yours that carries the name of a "
            "standard one needs another name")


@contextmanager
def _import_errors(wanted: Wanted, source: str) -> Iterator[None]:
    """Turn what a module raises while it is imported into one error with the real cause."""
    try:
        yield
    except PpocliError:
        raise
    except (Exception, SystemExit) as error:
        place = raised_at(error)
        raise wanted.refused(
            f"Importing {source} for {wanted.spec!r} failed: {error_line(error)}",
            where=f"{place} (from {wanted.key})" if place else None,
            fix=f"make it importable; try: python -c 'import {Path(source).stem}'",
        ) from error


def _load_module(name: str, wanted: Wanted) -> ModuleType:
    if not name or name.startswith(".") or not all(p.isidentifier() for p in name.split(".")):
        raise wanted.refused(
            f"{wanted.spec!r} is not an import path: {name!r} can't be a module's name.",
            fix=f"one of these forms: {wanted.forms}")
    if _is_standard(name):
        raise _standard_library_error(wanted, f"{name!r} belongs to Python itself")
    importlib.invalidate_caches()
    with _import_errors(wanted, name):
        try:
            return importlib.import_module(name)
        except ModuleNotFoundError as error:
            missing = error.name or ""
            if name == missing or name.startswith(missing + "."):
                raise _no_module(name, wanted) from None
            raise


def _load_file(source: str, wanted: Wanted) -> ModuleType:
    path = Path(source).expanduser().resolve()
    if not path.is_file():
        folder = path.parent
        near = suggestion(path.name, (p.name for p in folder.glob("*.py")))
        where_looked = f"folder {folder}" if folder.is_dir() else f"no folder {folder} either"
        raise wanted.refused(f"There is no file {source!r} ({where_looked}). {near}".rstrip(),
                             fix="give the file's path from the current folder")
    # The name carries the file's time, so that an edited file is read anew in a long session.
    stamp = hashlib.sha256(f"{path}:{path.stat().st_mtime_ns}".encode()).hexdigest()[:12]
    name = f"_ppocli_user_{path.stem}_{stamp}"
    if name in sys.modules:
        return sys.modules[name]
    module_spec = importlib.util.spec_from_file_location(name, path)
    if module_spec is None or module_spec.loader is None:
        raise wanted.refused(f"{source!r} is not a Python file.", fix="give a .py file")
    module = importlib.util.module_from_spec(module_spec)
    if str(path.parent) not in sys.path:  # its neighbours, as `python path/to/file.py` sees them
        sys.path.append(str(path.parent))
    sys.modules[name] = module  # dataclasses and pickling look their module up
    try:
        with _import_errors(wanted, source):
            module_spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def _split_dotted(path: str, wanted: Wanted) -> tuple[ModuleType, str]:
    """The longest importable module at the start of ``a.b.c.d``, and the attribute path left."""
    parts = path.split(".")
    module = _load_module(parts[0], wanted)
    for position in range(1, len(parts)):
        part, is_last = parts[position], position == len(parts) - 1
        found = getattr(module, part, None)
        if found is not None and not isinstance(found, ModuleType):
            return module, ".".join(parts[position:])
        name = ".".join(parts[:position + 1])
        if found is None and not _submodule_exists(module, name):
            if is_last:
                return module, part
            raise _no_module(name, wanted, package=module)
        module = _load_module(name, wanted)
    raise _no_function(wanted)


def _submodule_exists(package: ModuleType, name: str) -> bool:
    if not hasattr(package, "__path__"):
        return False
    return importlib.util.find_spec(name) is not None


def _no_module(name: str, wanted: Wanted, package: ModuleType | None = None) -> PpocliError:
    """The error for a module (or short name) that isn't there, with the nearest that is."""
    parent, _, leaf = name.rpartition(".")
    package = package or sys.modules.get(parent)
    spec, built_in = wanted.spec, wanted.kind.short_names
    if parent and package is not None:
        candidates = [m.name for m in pkgutil.iter_modules(getattr(package, "__path__", []))]
        what = f"There is no module {leaf!r} in {parent!r}."
    else:
        leaf = name.partition(".")[0]
        candidates = _local_modules()
        what = f"There is no module {leaf!r} in {os.getcwd()} or among the installed packages."
        if ":" not in spec and "." not in spec:
            candidates += built_in
            what = f"{spec!r} is neither a built-in reward nor an import path."
    near = suggestion(leaf, candidates)
    names = f"; or a built-in: {', '.join(sorted(built_in))}" if built_in else ""
    return wanted.refused(f"{what} {near}".rstrip(), where=f"{wanted.key}={spec}",
                          fix=f"one of these forms: {wanted.forms}{names}")


def _no_function(wanted: Wanted) -> PpocliError:
    spec, noun = wanted.spec, wanted.kind.noun
    module = spec.rstrip(":")
    module = module if module.endswith(".py") else module.replace(":", ".")
    return wanted.refused(f"{spec!r} names a module or file, but no {noun} in it.",
                          fix=f"{wanted.key}={module}:{noun.upper()}")


def _local_modules() -> list[str]:
    here = os.getcwd()
    names = [module.name for module in pkgutil.iter_modules([here])]
    with os.scandir(here) as entries:
        folders = [entry for entry in entries if entry.is_dir() and entry.name.isidentifier()]
    return names + [folder.name for folder in folders if any(Path(folder.path).glob("*.py"))]


def _attribute(module: ModuleType, attribute: str, wanted: Wanted) -> Any:
    found: Any = module
    for part in attribute.split("."):
        if not hasattr(found, part):
            names = [name for name in dir(found)
                     if not name.startswith("_") and callable(getattr(found, name, None))]
            home = getattr(module, "__file__", None)
            owner = f"{module.__name__!r} ({short_path(home)})" if home else f"{module.__name__!r}"
            if home and module.__name__.startswith("_ppocli_user_"):
                owner = f"{short_path(home)!r}"
            hint = suggestion(part, names) or (
                f"It has: {', '.join(sorted(names)[:10])}." if names else "It has no functions.")
            raise wanted.refused(f"There is no {part!r} in {owner}. {hint}",
                                 where=f"{wanted.key}={wanted.spec}",
                                 fix=f"name a {wanted.kind.noun} that the module has")
        found = getattr(found, part)
    if isinstance(found, ModuleType):
        raise _no_function(wanted)
    return found


def shorten(text: str) -> str:
    """``text`` as one quoted line of at most about 100 characters, the middle left out."""
    text = hide_secrets(text)  # half of a token is no longer known as one
    if len(text) > SHOWN_CHARS:
        half = SHOWN_CHARS // 2
        text = f"{text[:half]} ... {text[-half:]}"
    return repr(text)


def code_home(target: Any) -> tuple[str | None, int | None]:
    """File and first line of a function, class or callable object; ``None`` where unknown."""
    target = inspect.unwrap(getattr(target, "func", target))
    if not (inspect.isroutine(target) or inspect.isclass(target)):
        target = type(target)
    try:
        return inspect.getsourcefile(target), inspect.getsourcelines(target)[1]
    except (TypeError, OSError):
        return None, None


def raised_at(error: BaseException, file: str | None = None) -> str | None:
    """``FILE:LINE`` where ``error`` was raised.

    The innermost frame inside ``file`` when the traceback passes through it (that is the user's own
    line rather than a library's), else the innermost frame outside the import machinery.
    """
    if isinstance(error, SyntaxError) and error.filename:
        return f"{short_path(error.filename)}:{error.lineno}"
    frames = [frame for frame in traceback.extract_tb(error.__traceback__)
              if not frame.filename.startswith("<frozen importlib")]
    own = [frame for frame in frames if file is not None and frame.filename == file]
    for frame in reversed(own or frames):
        return f"{short_path(frame.filename)}:{frame.lineno}"
    return None
