"""A package named wandb that does as it is told: notes its calls, raises, dies or hangs."""

import importlib.util
import json
import os
from pathlib import Path

DOUBLE = '''\
import json, os, time

TROUBLE = os.environ.get("DOUBLE_TROUBLE", "")


def note(what, **more):
    with open(os.environ["DOUBLE_CALLS"], "a") as calls:
        calls.write(json.dumps({"call": what, **more}) + "\\n")
    if TROUBLE == f"{what} hangs":
        time.sleep(600)
    if TROUBLE == f"{what} raises" or TROUBLE == f"{what} raises online" and more["mode"] is None:
        raise RuntimeError(f"no {what} today: HF_TOKEN=hf_abcdefghijklmnopqrstuvwxyz.")
    if TROUBLE == f"{what} dies":
        os._exit(9)


class Settings:
    sync_dir = "there"

    def __init__(self, **settings):
        pass


class Table:
    def __init__(self, columns, data):
        self.told = [columns, data]


class Run:
    settings = Settings()
    url = "https://wandb.invalid/run"

    def __init__(self, mode):
        self.offline = (mode or os.environ.get("WANDB_MODE")) == "offline"
        self.step = int(os.environ.get("DOUBLE_STEP", 0))

    def log(self, figures, step):
        plain = {k: v.told if isinstance(v, Table) else v for k, v in figures.items()}
        note("log", step=step, figures=plain)

    def finish(self, exit_code):
        note("finish", code=exit_code)


def init(**words):
    del words["settings"]
    note("init", pid=os.getpid(), **words)
    return Run(words["mode"])


def teardown():
    pass
'''


def put_double(folder: Path, trouble: str = "") -> dict[str, str]:
    """Write the package; returns the environment in which it is found and told what to do."""
    (folder / "site").mkdir(exist_ok=True)
    (folder / "site/wandb.py").write_text(DOUBLE)
    path = [str(folder / "site"), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {"PYTHONPATH": os.pathsep.join(path), "DOUBLE_TROUBLE": trouble,
            "DOUBLE_CALLS": str(folder / "calls.jsonl")}


def calls(folder: Path, name: str) -> list[dict]:
    """What the package was called with, by the name of the call."""
    path = folder / "calls.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    return [row for row in rows if row["call"] == name]


def installed(name: str) -> bool:
    """Whether a library can be imported; a folder of its name is not it."""
    found = importlib.util.find_spec(name)
    return found is not None and found.origin is not None
