"""The user's code: from an import path to the object it names, with file and line for messages, and
whether a class can stand in for one of ppocli's."""

import ast
import functools
import hashlib
import importlib.util
import inspect
import os
import re
import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

from ppocli.config.import_guard import ENTRY_POINTS, join_working_directory, limited, may_name
from ppocli.config.secrets import hide_secrets
from ppocli.config.text import error_line, pasted, raised_at, short_path, suggestion
from ppocli.errors import PpocliError

SHOWN_CHARS = 100
"""maximum characters of a sample in a message"""


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of user code, for messages about a path to it."""

    noun: str
    """``function`` or ``class``"""
    error: type[PpocliError]
    """raised for a path that can't be used"""
    short_names: Mapping[str, str] = field(default_factory=dict)
    """name of a built-in -> its import path"""


@dataclass(frozen=True, slots=True)
class CodeSetting:
    """A config key's value that names code."""

    spec: str
    """the value, an import path or the name of a built-in"""
    key: str
    """the config key, such as ``reward.fn``"""
    kind: Kind

    def refused(self, what: str, *, fix: str, where: str | None = None) -> PpocliError:
        """The error for a path that can't be used."""
        return self.kind.error(what, where=where or f"{self.key}={self.spec}", fix=fix)


@dataclass(frozen=True, slots=True)
class Located:
    """A callable that a key names, without arguments."""

    spec: str
    """as of :class:`CodeSetting`"""
    key: str
    """as of :class:`CodeSetting`"""
    target: Callable[..., Any]
    """function, class or callable object"""
    file: str | None
    """source file, for ``running code from FILE``"""
    line: int | None
    module: str
    """the module of its code"""

    @property
    def label(self) -> str:
        """``my_rewards:score (my_rewards.py:12)``"""
        if self.file is None:
            return self.spec
        return f"{self.spec} ({short_path(self.file)}:{self.line})"


def locate(setting: CodeSetting) -> Located:
    """Import the function, class or other callable that a setting names:
    ``pkg.module:function``, ``pkg.module.function``, ``path/to/file.py:function`` or a built-in's
    name; behind a colon nested attributes work as well.

    Raises:
        PpocliError: of the setting's kind: no such module, file or attribute; an error inside the
            module; something that can't be called; or code that a configuration may not name
            (:mod:`ppocli.config.import_guard`).
    """
    source, attribute, is_file = _parted(setting)
    _refuse_unnamable(setting, None if is_file else source, source if is_file else None)
    module = _load_file(source, setting) if is_file else _load_module(source, setting)
    target: Any = module
    for part in attribute.split("."):
        if not hasattr(target, part):
            names = [name for name in dir(target)
                     if not name.startswith("_") and callable(getattr(target, name, None))]
            home = short_path(getattr(module, "__file__", None) or module.__name__)
            raise _no_attribute(part, home, names, setting)
        target = getattr(target, part)
    located = from_object(target, setting)
    if inspect.isroutine(located.target) or inspect.isclass(located.target):
        # the module may have imported a function or class from elsewhere; it made other objects
        _refuse_unnamable(setting, located.module, located.file)
    return located


def _parted(setting: CodeSetting) -> tuple[str, str, bool]:
    """(file or module, name in it, whether it is a file) of a path."""
    path = setting.kind.short_names.get(setting.spec, setting.spec)
    join_working_directory()
    source, colon, attribute = path.rpartition(":")
    if path.endswith(".py") or (colon and not attribute):
        raise _no_function(setting)
    if colon and (source.endswith(".py") or os.sep in source):
        return source, attribute, True
    if not colon:
        source, _, attribute = path.rpartition(".")
    if not all(part.isidentifier() for part in source.split(".")):
        raise _no_module(setting)
    return source, attribute, False


def refuse_absent(setting: CodeSetting) -> None:
    """Refuse a path that leads nowhere, as far as can be seen without running code.

    Raises:
        PpocliError: of the setting's kind: no built-in, file, package or definition of that name.
    """
    source, attribute, is_file = _parted(setting)
    file, name = str(_existing_file(source, setting)) if is_file else None, attribute.partition(
        ".")[0]
    if not is_file:
        top = source.partition(".")[0]
        if top in sys.modules:
            return
        if (module_spec := importlib.util.find_spec(top)) is None:
            raise _no_module(setting)
        file = module_spec.origin if source == top else None
    if file is None or not file.endswith(".py"):
        return
    text = Path(file).read_text(encoding="utf-8", errors="replace")
    if not re.search(rf"\b{re.escape(name)}\b|import \*|__getattr__|globals|setattr", text):
        raise _no_attribute(name, short_path(file), _defined(file, setting.kind.noun), setting)


def _refuse_unnamable(setting: CodeSetting, module: str | None, file: str | None) -> None:
    """Refuse code that a configuration names but may not."""
    ours = [path.partition(":")[0] for path in setting.kind.short_names.values()]
    shipped = any(f"{module}.".startswith(f"{name}.") for name in ours)
    if setting.spec in limited and not shipped and not may_name(module, file):
        raise setting.refused(
            f"{setting.spec!r} is refused: a configuration file names it, and it leads to "
            f"{file or module}, which is neither under the current folder nor in a package that "
            f"declares an entry point in the group {ENTRY_POINTS}.",
            fix=f"if you mean it, type it: {pasted(f'{setting.key}={setting.spec}')}")


def from_object(target: Any, setting: CodeSetting) -> Located:
    """Check a Python object as :func:`locate` does, and find the file and line of its code.

    Raises:
        PpocliError: it can't be called.
    """
    if isinstance(target, ModuleType):
        raise _no_function(setting)
    if not callable(target):
        raise setting.refused(
            f"{setting.spec!r} is of type {type(target).__name__}, which can't be called.",
            fix="name a function, a class or a callable object")
    code = target
    while isinstance(code, functools.partial):
        code = code.func
    code = inspect.unwrap(code)
    if not (inspect.isroutine(code) or inspect.isclass(code)):
        code = type(code)
    module_name = getattr(code, "__module__", None) or ""
    file = line = None
    with suppress(TypeError, OSError):
        file, line = inspect.getsourcefile(code), inspect.getsourcelines(code)[1]
    return Located(setting.spec, setting.key, target, file, line, module_name)


@contextmanager
def _import_errors(setting: CodeSetting, source: str) -> Iterator[None]:
    """Turn an exception during an import into an error that names the module and the cause."""
    try:
        yield
    except PpocliError:
        raise
    except (Exception, SystemExit) as error:
        place = raised_at(error)
        way = pasted(source) if source.endswith(".py") else f"-c 'import {source}'"
        raise setting.refused(
            f"Importing {source} for {setting.spec!r} failed: {error_line(error)}",
            where=place and f"{place} (from {setting.key})",
            fix=f"make it importable; try: python {way}") from error


def _load_module(name: str, setting: CodeSetting) -> ModuleType:
    importlib.invalidate_caches()
    with _import_errors(setting, name):
        try:
            return importlib.import_module(name)
        except ModuleNotFoundError as error:
            if f"{name}.".startswith(f"{error.name}."):
                raise _no_module(setting, error.name) from None
            raise


def _existing_file(source: str, setting: CodeSetting) -> Path:
    path = Path(source).expanduser().resolve()
    if not path.is_file():
        near = suggestion(path.name, (each.name for each in path.parent.glob("*.py")))
        raise setting.refused(
            f"There is no file {source!r} (folder {path.parent}). {near}".rstrip(),
            fix="give the file's path from the current folder")
    return path


def _load_file(source: str, setting: CodeSetting) -> ModuleType:
    path = _existing_file(source, setting)
    # The name carries the file's time, so that an edited file is read anew in a long session.
    stamp = hashlib.sha256(f"{path}:{path.stat().st_mtime_ns}".encode()).hexdigest()[:12]
    name = f"_ppocli_user_{path.stem}_{stamp}"
    if name in sys.modules:
        return sys.modules[name]
    module_spec = importlib.util.spec_from_file_location(name, path)
    if module_spec is None or module_spec.loader is None:
        raise setting.refused(f"{source!r} is not a Python file.", fix="give a .py file")
    module = importlib.util.module_from_spec(module_spec)
    if str(path.parent) not in sys.path:  # its neighbours, as `python path/to/file.py` sees them
        sys.path.append(str(path.parent))
    sys.modules[name] = module  # dataclasses and pickling look their module up
    try:
        with _import_errors(setting, source):
            module_spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def _no_module(setting: CodeSetting, name: str | None = None) -> PpocliError:
    """The error for a missing module or built-in; suggests the nearest that exists."""
    spec, noun, here, built_in = setting.spec, setting.kind.noun, Path.cwd(), \
        setting.kind.short_names
    module = name or spec.partition(":")[0].partition(".")[0]
    if spec == module and (here / f"{spec}.py").is_file():
        return _no_function(setting)
    what = (f"There is no module {module!r} in {here} or among the installed packages."
            if spec != module else f"{spec!r} is neither a built-in nor an import path.")
    near = suggestion(module, [*(file.stem for file in here.glob("*.py")),
                               *(built_in if spec == module else ())])
    names = f"; or a built-in: {', '.join(sorted(built_in))}" if built_in else ""
    return setting.refused(f"{what} {near}".rstrip(), fix="one of these forms: pkg.module:"
                           f"{noun}, pkg.module.{noun}, path/to/file.py:{noun}{names}")


def _no_function(setting: CodeSetting) -> PpocliError:
    spec, noun, module = setting.spec, setting.kind.noun, setting.spec.rstrip(":")
    module = module if module.endswith(".py") else module.replace(":", ".")
    return setting.refused(f"{spec!r} names a module or file, but no {noun} in it.",
                           fix=" or ".join(pasted(f"{setting.key}={module}:{name}") for name in
                                           _defined(module, noun)[:3] or [noun.upper()]))


def _defined(module: str, noun: str) -> list[str]:
    """The public functions or classes that the user's file defines; the file isn't run."""
    path = Path(module if module.endswith(".py") else module.replace(".", "/") + ".py")
    try:
        body = ast.parse(path.read_bytes()).body
    except (OSError, SyntaxError, ValueError):
        return []
    kinds = (ast.ClassDef,) if noun == "class" else (ast.FunctionDef, ast.ClassDef)
    return [node.name for node in body if isinstance(node, kinds) and not node.name.startswith("_")]


def _no_attribute(part: str, home: str, names: list[str], setting: CodeSetting) -> PpocliError:
    """The error for a module without that function; suggests the nearest that it has."""
    hint = suggestion(part, names) or (
        f"It has: {', '.join(sorted(names)[:10])}." if names else "It has no functions.")
    return setting.refused(f"There is no {part!r} in {home!r}. {hint}",
                           fix=f"name a {setting.kind.noun} that the module has")


def check_class(setting: CodeSetting, base: type, required: Collection[str] = ()) -> Located:
    """Import what ``setting`` names and, if it is a class, check that it has the methods of
    ``base``.

    Args:
        base: an abstract class, of which it must be a subclass, or a protocol.
        required: names of the methods (default: the abstract ones of ``base``, or all).

    Raises:
        PpocliError: as :func:`locate`; methods are missing.
    """
    located = locate(setting)
    cls: Any = located.target
    if not inspect.isclass(cls):
        return located
    is_abstract = inspect.isabstract(base)
    methods = required or getattr(base, "__abstractmethods__", ()) or [
        name for name, value in vars(base).items()
        if inspect.isfunction(value) and not name.startswith("_")]
    lacking = [] if hasattr(cls, "__getattr__") else [
        name for name in methods if getattr(cls, name, None) in (None, getattr(base, name))]
    if is_abstract and not issubclass(cls, base):
        raise setting.refused(f"{cls.__name__} is no subclass of {base.__module__}."
                              f"{base.__name__}.", fix="make it a subclass")
    if lacking := sorted({*lacking, *getattr(cls, "__abstractmethods__", ())}):
        raise setting.refused(f"{cls.__name__} lacks {', '.join(lacking)}.",
                              where=f"{setting.key}={located.label}",
                              fix=f"define each as {base.__module__}.{base.__name__} has it")
    return located


def build(setting: CodeSetting, base: type, *arguments: Any, kwargs: Mapping[str, Any], key: str
          ) -> Any:
    """Call the function or class that ``setting`` names, and return its result.

    Args:
        base: the class that the result replaces: it needs its methods and annotated attributes.
        arguments: arguments from ppocli.
        kwargs: arguments from the user.
        key: the config key of ``kwargs``, for messages.

    Raises:
        PpocliError: as :func:`check_class`; or the call doesn't take these arguments, or its result
            lacks something.
    """
    located = check_class(setting, base)
    try:
        made = located.target(*arguments, **kwargs)
    except TypeError as error:
        raise setting.refused(f"{setting.spec} can't be called with what it gets: {error}.",
                              where=raised_at(error, located.file),
                              fix="it gets one argument from ppocli, and those of "
                              f"{key}={dict(kwargs)} by name") from error
    if absent := [name for name in inspect.get_annotations(base)
                  if not (hasattr(base, name) or hasattr(made, name))]:
        raise setting.refused(f"{type(made).__name__} sets no {' and no '.join(absent)}.",
                              where=f"{setting.key}={located.label}",
                              fix="set it in the class, or in __init__")
    return made


def shorten(text: str) -> str:
    """``text`` as one quoted line of at most about 100 characters, the middle left out."""
    text = hide_secrets(text)  # half of a token is no longer known as one
    if len(text) > SHOWN_CHARS:
        text = f"{text[:SHOWN_CHARS // 2]} ... {text[-SHOWN_CHARS // 2:]}"
    return repr(text)
