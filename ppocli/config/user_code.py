"""The user's code: from an import path to the object it names, with file and line for messages.

Only the user's code and installed third-party packages are accepted. A shared recipe names Python
that will run, so ``os:system`` and all of the standard library is refused.
"""

import ast
import functools
import hashlib
import importlib.util
import inspect
import os
import pkgutil
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

from ppocli.config.import_guard import (
    ENTRY_POINTS,
    join_working_directory,
    limited,
    may_name,
    refuse_other_neighbours,
)
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

    @property
    def forms(self) -> str:
        """The forms of an import path, for messages."""
        return ", ".join(form + self.kind.noun for form in (
            "pkg.module:", "pkg.module.", "path/to/file.py:"))

    def refused(self, what: str, *, fix: str, where: str | None = None) -> PpocliError:
        """The error for a path that can't be used."""
        return self.kind.error(what, where=where or self.key, fix=fix)


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
    name; nested attributes work as well.

    Raises:
        PpocliError: of the setting's kind: no such module, file or attribute; an error inside the
            module; something that can't be called; code of the standard library; or code that a
            configuration may not name (:mod:`ppocli.config.import_guard`).
    """
    file, module_name, attribute = _parted(setting)
    _refuse_unnamable(setting, module_name, file)
    if file is not None:
        module = _load_file(file, setting)
    elif attribute:
        module = _load_module(module_name or "", setting)
    else:
        module, attribute = _split_dotted(module_name or "", setting)
    located = from_object(_attribute(module, attribute, setting), setting)
    if inspect.isroutine(located.target) or inspect.isclass(located.target):
        # the module may have imported a function or class from elsewhere; it made other objects
        _refuse_unnamable(setting, located.module, located.file)
    return located


def _parted(setting: CodeSetting) -> tuple[str | None, str | None, str]:
    """(file, module, name in it) of a path; of a path with dots alone, all is the module."""
    path = setting.kind.short_names.get(setting.spec, setting.spec)
    join_working_directory()
    source, colon, attribute = path.rpartition(":")
    if path.endswith(".py") or (colon and not attribute):
        raise _no_function(setting)
    if not colon and "." not in path:
        raise _no_module(path, setting)
    if colon and (source.endswith(".py") or os.sep in source):
        return source, None, attribute
    return None, source if colon else path, attribute if colon else ""


def refuse_absent(setting: CodeSetting) -> None:
    """Refuse a path that leads nowhere, as far as can be seen without running code.

    Raises:
        PpocliError: of the setting's kind: no built-in, file, package or definition of that name.
    """
    file, module, attribute = _parted(setting)
    if module is None:
        file = str(_existing_file(file or "", setting))
    else:
        top = module.partition(".")[0]
        if not top.isidentifier() or top in sys.modules:
            return
        if (module_spec := importlib.util.find_spec(top)) is None:
            raise _no_module(module, setting)
        file = module_spec.origin if attribute and module == top else None
    name = attribute.partition(".")[0]
    if file is not None and not _may_define(file, name):
        raise _no_attribute(name, short_path(file), _defined(file, setting.kind.noun), setting)


def _may_define(file: str, name: str) -> bool:
    """Whether a line of a module may define ``name``; true for a module that can't be read."""
    try:
        nodes = list(ast.walk(ast.parse(Path(file).read_bytes())))
    except (OSError, SyntaxError, ValueError):
        return True
    bound = {alias.asname or alias.name.partition(".")[0] for node in nodes
             if isinstance(node, ast.Import | ast.ImportFrom) for alias in node.names}
    bound |= {str(getattr(node, "name", getattr(node, "id", ""))) for node in nodes}
    return bool(bound & {name, "*", "__getattr__", "globals", "vars", "setattr", "exec"})


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
        PpocliError: it can't be called, or belongs to the standard library.
    """
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
    module_name = getattr(code, "__module__", None)
    if module_name is None:  # methods of built-in types carry no module
        module_name = type(getattr(code, "__self__", code)).__module__
    _refuse_standard_library(module_name, setting)
    file = line = None
    with suppress(TypeError, OSError):
        file, line = inspect.getsourcefile(code), inspect.getsourcelines(code)[1]
    return Located(setting.spec, setting.key, target, file, line, module_name)


def _refuse_standard_library(module_name: str, setting: CodeSetting) -> None:
    if module_name.partition(".")[0] in sys.stdlib_module_names:
        raise setting.refused(
            f"{setting.spec!r} is refused: it is part of Python's {module_name!r}, and a "
            "configuration may not run the standard library.",
            fix=f"name a {setting.kind.noun} of your own; a module of yours that carries the name "
                "of a standard one needs another name")


@contextmanager
def _import_errors(setting: CodeSetting, source: str) -> Iterator[None]:
    """Turn an exception during an import into an error that names the module and the cause."""
    try:
        yield
    except PpocliError:
        raise
    except (Exception, SystemExit) as error:
        place, module = raised_at(error), source
        if relative := "relative import" in str(error):
            module = os.path.relpath(source).removesuffix(".py").replace(os.sep, ".")
        way = pasted(source) if module.endswith(".py") else f"-c 'import {module}'"
        raise setting.refused(
            f"Importing {source} for {setting.spec!r} failed: {error_line(error)}",
            where=place and f"{place} (from {setting.key})",
            fix=f"make it importable{f' as {module}' * relative}; try: python {way}") from error


def _load_module(name: str, setting: CodeSetting) -> ModuleType:
    if not all(part.isidentifier() for part in name.split(".")):
        raise setting.refused(
            f"{setting.spec!r} is not an import path: {name!r} can't be a module's name.",
            fix=f"one of these forms: {setting.forms}")
    _refuse_standard_library(name, setting)
    importlib.invalidate_caches()
    with _import_errors(setting, name):
        try:
            return importlib.import_module(name)
        except ModuleNotFoundError as error:
            missing = error.name or ""
            if name == missing or name.startswith(missing + "."):
                raise _no_module(name, setting) from None
            raise


def _existing_file(source: str, setting: CodeSetting) -> Path:
    path = Path(source).expanduser().resolve()
    if not path.is_file():
        folder = path.parent
        near = suggestion(path.name, (p.name for p in folder.glob("*.py")))
        where_looked = f"folder {folder}" if folder.is_dir() else f"no folder {folder} either"
        raise setting.refused(f"There is no file {source!r} ({where_looked}). {near}".rstrip(),
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
            refuse_other_neighbours(path, setting.refused)
            module_spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def _split_dotted(path: str, setting: CodeSetting) -> tuple[ModuleType, str]:
    """The longest importable module at the start of ``a.b.c.d``, and the rest, its attribute."""
    parts = path.split(".")
    module = _load_module(parts[0], setting)
    for position, part in enumerate(parts[1:], start=1):
        member, left = getattr(module, part, None), parts[position:]
        name = ".".join(parts[:position + 1])
        if isinstance(member, ModuleType) or (
                member is None and hasattr(module, "__path__") and importlib.util.find_spec(name)):
            module = _load_module(name, setting)
        elif member is None and len(left) > 1:
            raise _no_module(name, setting)
        else:
            return module, ".".join(left)
    raise _no_function(setting)


def _no_module(name: str, setting: CodeSetting) -> PpocliError:
    """The error for a missing module or built-in; suggests the nearest that exists."""
    if Path(f"{setting.spec}.py").is_file():
        return _no_function(setting)
    parent, _, leaf = name.rpartition(".")
    spec, built_in = setting.spec, setting.kind.short_names
    if parent in sys.modules:
        folders = getattr(sys.modules[parent], "__path__", [])
        candidates = [module.name for module in pkgutil.iter_modules(folders)]
        what = f"There is no module {leaf!r} in {parent!r}."
    else:
        leaf, here = name.partition(".")[0], Path.cwd()
        candidates = [file.stem for file in here.glob("*.py")]
        candidates += [file.parent.name for file in here.glob("*/*.py")]
        what = f"There is no module {leaf!r} in {here} or among the installed packages."
        if ":" not in spec and "." not in spec:
            candidates += built_in
            what = (f"{spec!r} is neither a built-in nor an import path." if built_in else
                    f"{spec!r} is no import path.")
    near = suggestion(leaf, candidates)
    names = f"; or a built-in: {', '.join(sorted(built_in))}" if built_in else ""
    return setting.refused(f"{what} {near}".rstrip(), where=f"{setting.key}={spec}",
                           fix=f"one of these forms: {setting.forms}{names}")


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
    return [node.name for node in body if isinstance(node, kinds)
            and not node.name.startswith("_")]


def _attribute(module: ModuleType, attribute: str, setting: CodeSetting) -> Any:
    value: Any = module
    for part in attribute.split("."):
        if not hasattr(value, part):
            names = [name for name in dir(value)
                     if not name.startswith("_") and callable(getattr(value, name, None))]
            home = short_path(getattr(module, "__file__", None) or module.__name__)
            raise _no_attribute(part, home, names, setting)
        value = getattr(value, part)
    if isinstance(value, ModuleType):
        raise _no_function(setting)
    return value


def _no_attribute(part: str, home: str, names: list[str], setting: CodeSetting) -> PpocliError:
    """The error for a module without that function; suggests the nearest that it has."""
    hint = suggestion(part, names) or (
        f"It has: {', '.join(sorted(names)[:10])}." if names else "It has no functions.")
    file = f"{setting.spec.split(':')[0].split('.')[0]}.py"
    fix = (f"an installed package hides {file}; name the file: {setting.key}={file}:{part}"
           if file != home and Path(file).is_file() else
           f"name a {setting.kind.noun} that the module has")
    return setting.refused(f"There is no {part!r} in {home!r}. {hint}",
                           where=f"{setting.key}={setting.spec}", fix=fix)


def shorten(text: str) -> str:
    """``text`` as one quoted line of at most about 100 characters, the middle left out."""
    text = hide_secrets(text)  # half of a token is no longer known as one
    if len(text) > SHOWN_CHARS:
        text = f"{text[:SHOWN_CHARS // 2]} ... {text[-SHOWN_CHARS // 2:]}"
    return repr(text)
