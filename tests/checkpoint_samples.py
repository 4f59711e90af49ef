"""Small real checkpoints for the tests of saving, loading and killing."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from ppocli.runs.checkpoints import save_checkpoint

RUN = "run-1"
HERE = Path(__file__).resolve().parent


def write_files(step: int, floats: int = 200):
    """A ``write`` callback: two tensor files (one in a sub-folder) and a JSON file."""

    def write(staging: Path) -> None:
        (staging / "policy").mkdir()
        rng = np.random.default_rng(step)
        save_file({"w": rng.normal(size=floats).astype("float32")},
                  str(staging / "policy" / "model.safetensors"))
        (staging / "policy" / "config.json").write_text(json.dumps({"step": step}))
        save_file({"rng": rng.integers(0, 255, size=64).astype("uint8")},
                  str(staging / "rng.safetensors"))

    return write


def save(folder: Path, step: int, *, run_id: str = RUN, floats: int = 200, write=None,
         state: dict | None = None, digest: str = "c0ffee") -> Path:
    state = state or {"step": step, "cursor": step * 8, "big": 2**100 + step}
    return save_checkpoint(folder, step, run_id=run_id, write=write or write_files(step, floats),
                           state=state, config_digest=digest, versions={"torch": "2.13.0"})


def names(folder: Path) -> list[str]:
    """What a folder holds."""
    return sorted(path.name for path in folder.iterdir())


def start_python(code: str, *arguments: object, faults: str = "", **options) -> subprocess.Popen:
    """Run ``code`` in a fresh Python that finds these helpers; ``faults`` is PPOCLI_FAULTS."""
    env = {**os.environ, "PYTHONPATH": str(HERE), "PPOCLI_FAULTS": faults}
    return subprocess.Popen([sys.executable, "-c", code, *map(str, arguments)], env=env, text=True,
                            stdout=subprocess.PIPE, stderr=subprocess.PIPE, **options)


def tree(folder: Path) -> dict[str, bytes]:
    """Every file below ``folder`` with its content."""
    return {path.relative_to(folder).as_posix(): path.read_bytes()
            for path in sorted(folder.rglob("*")) if path.is_file()}
