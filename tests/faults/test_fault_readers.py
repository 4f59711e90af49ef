"""Run folders that somebody else has made, to hang or break whoever looks at them: one bad run is
one line of a list and one message elsewhere. Nothing of it reaches a terminal raw."""

import json
from pathlib import Path

import pytest

from ppocli.cli.follow import Follower
from ppocli.cli.output import code_of
from ppocli.cli.results import compare
from ppocli.cli.runs import print_runs, prune_runs, report
from ppocli.config.config_yaml import config_text
from ppocli.config.schema import TrainConfig
from ppocli.config.text import CONTROL

ESCAPE = "\x1b]0;owned\x07\x9b2J\u202e"


def bare_run(folder: Path) -> Path:
    """What a run of three steps leaves, as far as readers look at it."""
    config = TrainConfig()
    config.model.path, config.reward.fn, config.ppo.num_steps = "gpt2", "length", 3
    rows = [{"step": step, "episode": step, "reward/mean": 0.5, f"loss/{ESCAPE}": 1.0,
             f"eval/{ESCAPE}": 1.0} for step in (1, 2, 3)]
    folder.mkdir(parents=True)
    for name, text in {
            "config.yaml": config_text(config), "run.json": '{"run_id": "abc"}',
            "metrics.jsonl": "".join(json.dumps(row) + "\n" for row in rows),
            "summary.json": '{"status": "finished", "steps": 3, "eval_after": 5}',
            "samples.jsonl": "", "ppocli.log": f"2026-01-31 12:00:00,000 WARNING {ESCAPE}\n",
            ".lock": '{"pid": 1, "host": "elsewhere", "boot": "b", "started": 5}'}.items():
        (folder / name).write_text(text)
    return folder


def _set(key: str, value: str):
    def write(path: Path) -> None:
        lines = path.read_text().splitlines()
        path.write_text("\n".join(f"  {key}: {value}" if line.strip().startswith(f"{key}:")
                                  else line for line in lines))
    return write


ATTACKS = {
    "no rollouts": ("config.yaml", _set("num_rollouts", "0"), "num_rollouts: 0 must be >= 1"),
    "a deep row": ("metrics.jsonl", lambda path: path.write_text('{"step": ' + "[" * 10**5), None),
}


@pytest.mark.parametrize("attack", ATTACKS)
def test_one_bad_run_is_one_line_and_one_message(attack, here, capsys):
    name, spoil, said = ATTACKS[attack]
    for run in ("bad", "good"):
        bare_run(here / "runs" / run)
    spoil(here / "runs/bad" / name)
    assert code_of(lambda: print_runs(None, True)) == 0
    found = {info["name"]: info for info in json.loads(capsys.readouterr().out)}
    assert sorted(found) == ["bad", "good"]
    assert found["good"]["status"] == "finished"
    assert (found["bad"]["status"] == "damaged") == (said is not None)
    assert code_of(lambda: print_runs(None, False)) == 0
    assert len(capsys.readouterr().out.splitlines()) == 3
    assert code_of(lambda: prune_runs(
        None, keep_best=False, older_than=None, dry_run=True, yes=True, as_json=False)) == 0

    def watch() -> None:
        follower = Follower(Path("runs/bad"), True, False)
        follower.look()
        print(follower.ending())

    for look in (lambda: report("runs/bad", None, None, False, True),
                 lambda: compare(["runs/good", "runs/bad"], False), watch):
        capsys.readouterr()
        code = code_of(look)
        told = "".join(capsys.readouterr())
        assert code == (0 if said is None else 5), told
        assert said is None or said in told
        assert not CONTROL.search(told)
