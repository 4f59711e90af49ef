"""The command as a process: exit codes, wording, what is imported, terminals that go away."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from helpers import ppocli

HEAVY = ("torch", "transformers", "deepspeed", "accelerate", "datasets")


def shell(line: str, cwd: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a line in which PPOCLI is the command, by an interpreter of its own."""
    command = line.replace("PPOCLI", f"{sys.executable} -m ppocli")
    return subprocess.run(["bash", "-c", command], cwd=cwd, text=True, capture_output=True,
                          timeout=60, check=False, env={**os.environ, **environment})


def imported_by(code: str, cwd: Path) -> set[str]:
    done = subprocess.run(
        [sys.executable, "-c", f"import sys\n{code}\nprint('MODULES', *sys.modules)"],
        cwd=cwd, text=True, capture_output=True, timeout=60, check=True)
    line = next(line for line in done.stdout.splitlines() if line.startswith("MODULES"))
    return {name.split(".")[0] for name in line.split()[1:]}


def test_the_command_line_imports_nothing_heavy(tmp_path):
    assert not imported_by("import ppocli.cli.app", tmp_path) & {*HEAVY, "hydra", "omegaconf"}
    words = "['+recipe=quickstart', '--cfg', 'job', '--resolve']"
    assert not imported_by(f"from ppocli.cli.train import run_words; run_words({words})",
                           tmp_path) & set(HEAVY)
    completion = "from ppocli.cli.options import complete_word as c; c([], 'ppo.kl_est')"
    assert not imported_by(completion, tmp_path) & {*HEAVY, "hydra"}


def test_help_shows_examples_groups_and_keys(tmp_path):
    done = shell("PPOCLI train --help", tmp_path)
    assert done.returncode == 0
    for part in ("ppocli train +recipe=quickstart", "Config groups:", "+recipe=imdb_sentiment|",
                 "model=", "reward=", "hardware=cpu|ddp|gpu|gpu_bf16|multi_node|zero1",
                 "ppo.total_episodes", "--multirun", "--hydra-help"):
        assert part in done.stdout, part


@pytest.mark.parametrize(("words", "said"), [
    (["tran"], "Did you mean 'train'?"),
    (["train", "--multirn"], "Error: unknown option --multirn; did you mean --multirun?"),
    (["train", "+recipe=quickstart", "ppo.lrr=1", "seed=x"], "Error: 2 problems"),
    (["train", "recipe=quickstrat"], "unknown recipe quickstrat; did you mean quickstart?"),
    (["recipes", "show", "quickstrat"], "did you mean quickstart?"),
    (["train", "-m", "+recipe=quickstart", "ppo.lrr=1,2"], "ppo.lrr: unknown key"),
    (["train", "-m", "+recipe=quickstart,nope"], "unknown recipe nope"),
    (["train", "-m", "+recipe=quickstart", "resume=runs/x"], "can't be swept"),
])
def test_usage_errors_are_2_on_stderr_without_traceback(words, said, tmp_path):
    done = ppocli(*words, cwd=tmp_path, code=2)
    assert said in done.stderr
    assert done.stdout == ""
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(("line", "code"), [
    ("PPOCLI train --cfg job -p seed 2>&-", 0), ("PPOCLI recipes list >&-", 0),
    ("PPOCLI train seed=x 2>&-", 2), ("PPOCLI recipes list >/dev/full", 6),
    ("PPOCLI recipes list | true; exit ${PIPESTATUS[0]}", 141), ("PPOCLI train --hydra-help", 0)])
def test_closed_and_full_streams(line, code, tmp_path):
    done = shell(line, tmp_path)
    assert done.returncode == code
    assert "Traceback" not in done.stderr


def test_recipes_are_listed_shown_and_copied(tmp_path):
    rows = json.loads(ppocli("recipes", "list", "--json", cwd=tmp_path).stdout)
    by_name = {row["name"]: row for row in rows}
    assert by_name["imdb_sentiment"]["needs_network"] is True
    assert by_name["quickstart"]["needs_network"] is False
    assert by_name["quickstart"]["model"] == "builtin:reviews"
    assert all(row["purpose"] for row in rows)
    table = ppocli("recipes", "list", cwd=tmp_path).stdout.splitlines()
    assert [line.split()[0] for line in table] == ["name", *by_name]

    shown = ppocli("recipes", "show", "quickstart", cwd=tmp_path).stdout
    assert shown == Path(by_name["quickstart"]["file"]).read_text()

    copied = ppocli("recipes", "copy", "quickstart", "recipes/mine.yaml", cwd=tmp_path)
    assert copied.stdout == "recipes/mine.yaml\n"
    assert "ppocli train +recipe=mine" in copied.stderr
    again = ppocli("recipes", "copy", "quickstart", "recipes/mine.yaml", cwd=tmp_path, code=2)
    assert "exists already" in again.stderr
    assert ppocli("recipes", "copy", "randomwalks", "recipes/mine.yaml", "--force",
                  cwd=tmp_path).returncode == 0
    path = ppocli("train", "+recipe=mine", "--cfg", "job", "-p", "model.path", cwd=tmp_path)
    assert path.stdout.strip() == "builtin:randomwalks"
    elsewhere = ppocli("recipes", "copy", "quickstart", "lib/", cwd=tmp_path)
    assert elsewhere.stdout == "lib/quickstart.yaml\n"
    assert "--config-dir lib +recipe=quickstart" in elsewhere.stderr
