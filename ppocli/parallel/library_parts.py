"""Whether an installed library still has the internals that ppocli's adapter module for it uses."""

from __future__ import annotations

import pkgutil
from collections.abc import Iterable

from ppocli.errors import ConfigError
from ppocli.storage.environment import installed_version


def check_parts(library: str, parts: Iterable[str]) -> None:
    """Refuse a library that has been changed inside, before a run starts on it.

    Args:
        parts: ``module:name.name`` each.

    Raises:
        ConfigError: one of them is missing.
    """
    for part in parts:
        try:
            pkgutil.resolve_name(part)
        except (ImportError, AttributeError):
            raise ConfigError(
                f"{library} {installed_version(library)} does not fit this ppocli: it has no "
                f"{part.replace(':', '.')}.", where=f"the installed {library}",
                fix=f"install a version of {library} that this ppocli was tested with") from None
