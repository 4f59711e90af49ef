"""Where the shipped ``conf/`` and ``recipes/`` folders lie."""

from __future__ import annotations

from pathlib import Path


def shipped(name: str) -> Path:
    """The absolute path of a shipped folder: ``conf`` or ``recipes``.

    In a wheel they lie inside the package, in a checkout (or an editable installation) beside it.

    Raises:
        FileNotFoundError: the installation is broken; neither place has the folder.
    """
    package = Path(__file__).resolve().parent.parent
    for candidate in (package / name, package.parent / name):
        if candidate.is_dir():
            return candidate
    raise FileNotFoundError(f"the {name}/ folder of ppocli is in neither {package} nor "
                            f"{package.parent}: the installation is incomplete")


def config_groups() -> dict[str, list[str]]:
    """The shipped config groups and their options, e.g. ``{"model": ["randomwalks", ...]}``."""
    return {folder.name: sorted(file.stem for file in folder.glob("*.yaml"))
            for folder in sorted(shipped("conf").iterdir()) if folder.is_dir()}


def recipe_files() -> dict[str, Path]:
    """Recipe names and files: those of ``./recipes`` in the current folder, then the shipped."""
    found: dict[str, Path] = {}
    for folder in (Path.cwd() / "recipes", shipped("recipes")):
        if folder.is_dir():
            for file in sorted(folder.glob("*.yaml")):
                found.setdefault(file.stem, file)
    return found
