"""Optional libraries: whether they are installed, and the extra of ppocli that installs each."""

import os
from importlib.util import find_spec
from pathlib import Path

from ppocli.config.schema_run import TRACKERS
from ppocli.errors import InputError

EXTRAS = {"bitsandbytes": "8bit", "matplotlib": "plot", "optuna": "sweep", "peft": "peft",
          "starlette": "serve", "uvicorn": "serve", **{name: name for name in TRACKERS}}
"""name to import -> extra"""
LAUNCHERS = {"joblib": "sweep", "submitit_local": "sweep", "submitit_slurm": "sweep", "ray": "ray"}
"""option of hydra/launcher -> extra"""


def installed(library: str) -> bool:
    """Whether a library can be imported. A file or folder of its name in the current folder, such
    as wandb creates for its files, is no library."""
    try:
        spec = find_spec(library)
    except (ValueError, ImportError):  # a module that somebody has made up
        return False
    if spec is None or spec.origin is None:
        return False
    folder = Path(spec.origin).parents[bool(spec.submodule_search_locations)]
    return os.path.realpath(folder) != os.path.realpath(os.getcwd())


def pip_line(library: str) -> str:
    """The command that installs a library."""
    return f"pip install 'ppocli[{EXTRAS[library]}]'" if library in EXTRAS else (
        f"pip install {library}")


def require(library: str, need: str, where: str) -> None:
    """Raise an error if a library isn't installed.

    Args:
        need: the feature that needs it, the subject of the message.
        where: the key or file that turns the feature on.

    Raises:
        InputError: it isn't installed.
    """
    if not installed(library):
        raise InputError(f"{need} needs {library}, which is not installed.", where=where,
                         fix=pip_line(library), code="not-installed")
