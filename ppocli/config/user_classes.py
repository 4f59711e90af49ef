"""Checks of the user's classes that replace a class of ppocli, made before anything is loaded."""

import inspect
from collections.abc import Iterator, Mapping
from inspect import Parameter
from typing import Any

from ppocli.config.text import error_line, raised_at
from ppocli.config.user_code import CodeSetting, Located, locate
from ppocli.errors import PpocliError

_POSITIONAL = (Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD)


def refuse_unfit(located: Located, base: type, error: type[PpocliError],
                 required: frozenset[str] | None = None) -> None:
    """Refuse a class without the methods of ``base``, or with methods of other arguments.

    Args:
        base: an abstract class or a protocol, whose signatures show how its methods are called:
            keyword-only arguments by name, the others by position.
        required: the methods that must exist (default: the abstract ones of ``base``).

    Raises:
        PpocliError: of the kind ``error``; names every method that is missing or wrong.
    """
    cls: Any = located.target
    if not inspect.isclass(cls) or cls.__new__ is not object.__new__:  # a function, in effect
        return
    if problems := list(_problems(cls, base, required)):
        raise error(f"{cls.__name__} {'; '.join(problems)}.",
                    where=f"{located.key}={located.label}",
                    fix="give it each method with the arguments that are shown" if
                    problems[0].startswith(("lacks", "has")) else "make it a subclass")


def refuse_abstract(located: Located, error: type[PpocliError]) -> None:
    """Refuse a class that is still abstract.

    Raises:
        PpocliError: of the kind ``error``; names the abstract methods.
    """
    cls: Any = located.target
    if inspect.isabstract(cls):
        lacking = ", ".join(sorted(cls.__abstractmethods__))
        raise error(f"{cls.__name__} lacks {lacking}, which a base class of it leaves abstract.",
                    where=f"{located.key}={located.label}", fix="define it")


def _problems(cls: Any, base: type, required: frozenset[str] | None) -> Iterator[str]:
    methods = {name: method for name, method in vars(base).items()
               if inspect.isfunction(method) and not name.startswith("_")}
    if inspect.isabstract(base) and not issubclass(cls, base):
        yield f"is no subclass of {base.__module__}.{base.__name__}"
        return
    if required is None:
        required = frozenset(getattr(base, "__abstractmethods__", ()) or methods)
    abstract: frozenset[str] = getattr(cls, "__abstractmethods__", frozenset())
    for name, method in methods.items():
        override = inspect.getattr_static(cls, name, None)
        if override is None or override is method or name in abstract:
            if name in required and not (override is None and hasattr(cls, "__getattr__")):
                yield f"lacks {name}{_shown(method)}"
        elif not callable(override) and not hasattr(override, "__get__"):
            yield f"has {name}, which is no method, in place of {name}{_shown(method)}"
        else:
            yield from _misfits(name, override, method)
    for name in sorted(abstract - methods.keys()):
        yield f"lacks {name}, which a base class of it leaves abstract"


def _misfits(name: str, override: Any, method: Any) -> Iterator[str]:
    """The ways in which a method can't be called like the one that it replaces."""
    function = getattr(override, "__func__", override)  # of a static method or one of the class
    # an object that can be called, such as a partial, is no method and gets no ``self``
    receiver = (None,) * (hasattr(function, "__get__") and not isinstance(override, staticmethod))
    _, *parameters = inspect.signature(method).parameters.values()
    positional = [one.name for one in parameters if one.kind in _POSITIONAL]
    named = {one.name: None for one in parameters if one.kind is Parameter.KEYWORD_ONLY}
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # of a callable without a signature
        return
    try:
        signature.bind(*receiver, *positional, **named)
    except TypeError as error:
        yield (f"has {name}{signature}, which is called as {name}{_shown(method)}: {error}")
    if inspect.iscoroutinefunction(function):
        yield f"has an async {name}, which nothing awaits"
    returns = str(inspect.signature(method).return_annotation)
    if inspect.isgeneratorfunction(function) and "Iterator" not in returns:
        yield f"has {name} as a generator, " + (
            "which needs @contextlib.contextmanager above it" if "ContextManager" in returns
            else "and it must return its result")


def _shown(method: Any) -> str:
    """``(state, batch, *, chunk)`` of a method, without ``self`` and types."""
    _, *parameters = inspect.signature(method).parameters.values()
    bare = [one.replace(annotation=Parameter.empty) for one in parameters]
    return str(inspect.Signature(bare))


def check_class(setting: CodeSetting, base: type) -> Located:
    """Import what ``setting`` names and, if it is a class, check it for the methods of ``base``.

    Raises:
        PpocliError: as :func:`~ppocli.config.user_code.locate` and :func:`refuse_unfit`.
    """
    located = locate(setting)
    refuse_unfit(located, base, setting.kind.error)
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
    target = (located := check_class(setting, base)).target
    try:
        inspect.signature(target).bind(*arguments, **kwargs)
    except TypeError as error:
        raise setting.refused(f"{setting.spec} can't be called with what it would get: {error}.",
                              where=f"{setting.key}, {key}",
                              fix="it gets one argument from ppocli, and those of "
                              f"{key}={dict(kwargs)} by name") from error
    try:
        made = target(*arguments, **kwargs)
    except TypeError as error:
        if not str(error).startswith("Can't instantiate abstract class"):
            raise
        raise setting.refused(f"{error_line(error)}.", where=raised_at(error, located.file),
                              fix="define that method") from error
    if inspect.isabstract(base) and not isinstance(made, base):
        raise setting.refused(f"{setting.spec} has returned {type(made).__name__}, which is no "
                              f"{base.__module__}.{base.__name__}.",
                              fix="return an instance of a subclass")
    if absent := [name for name in inspect.get_annotations(base)
                  if not (hasattr(base, name) or hasattr(made, name))]:
        raise setting.refused(f"{type(made).__name__} sets no {' and no '.join(absent)}.",
                              where=f"{setting.key}={located.label}",
                              fix="set it in the class, or in __init__")
    return made
