"""A package named wandb that notes its calls, and raises or hangs where a test wants it to."""

import importlib.util
import json
import os
import sys
from pathlib import Path

DOUBLE = '''\
import json, os, time


def note(what, **more):
    TROUBLE = os.environ.get("DOUBLE_TROUBLE", "")
    with open(os.environ["DOUBLE_CALLS"], "a") as calls:
        calls.write(json.dumps({"call": what, **more}) + "\\n")
    if TROUBLE == f"{what} hangs":
        time.sleep(600)
    if TROUBLE == f"{what} raises" or TROUBLE == f"{what} raises online" and more["mode"] is None:
        raise RuntimeError(f"no {what} today: HF_TOKEN=hf_abcdefghijklmnopqrstuvwxyz.")


class Settings:
    sync_dir = "there"

    def __init__(self, **settings):
        pass


class Table:
    def __init__(self, columns, data, dataframe):
        self.content = [columns, data]


class Run:
    settings = Settings()
    url = "https://wandb.invalid/run"

    def __init__(self, mode):
        self.offline = (mode or os.environ.get("WANDB_MODE")) == "offline"

    def log(self, figures, step):
        plain = {k: v.content if isinstance(v, Table) else v for k, v in figures.items()}
        note("log", step=step, figures=plain)

    def finish(self, exit_code):
        note("finish", code=exit_code)


def init(mode=None, **words):
    words["mode"] = mode
    del words["settings"]
    note("init", pid=os.getpid(), **words)
    return Run(words["mode"])


class Config:
    def update(self, values, allow_val_change):
        note("config", values=values)


config = Config()
'''


def put_double(folder: Path, trouble: str = "") -> dict[str, str]:
    """Write the package; returns the environment in which it is found and told what to do."""
    (folder / "site").mkdir(exist_ok=True)
    (folder / "site/wandb.py").write_text(DOUBLE)
    path = [str(folder / "site"), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {"PYTHONPATH": os.pathsep.join(path), "DOUBLE_TROUBLE": trouble,
            "DOUBLE_CALLS": str(folder / "calls.jsonl")}


def forget_double() -> None:
    """Let the next import look for wandb again, if the double is what was imported."""
    if hasattr(sys.modules.get("wandb"), "note"):
        del sys.modules["wandb"]


def calls(folder: Path, name: str) -> list[dict]:
    """What the package was called with, by the name of the call."""
    path = folder / "calls.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    return [row for row in rows if row["call"] == name]


def steps_of(tmp_path: Path) -> dict[int, dict]:
    """Step -> all that was logged for it, once each."""
    steps: dict[int, dict] = {}
    for row in calls(tmp_path, "log"):
        assert not steps.get(row["step"], {}).keys() & row["figures"].keys()
        steps.setdefault(row["step"], {}).update(row["figures"])
    return steps


def installed(name: str) -> bool:
    """Whether a library can be imported; a folder of its name is not it."""
    found = importlib.util.find_spec(name)
    return found is not None and found.origin is not None
