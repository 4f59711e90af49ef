"""The command as a process: exit codes, wording, what is imported, terminals that go away; and in
this one: quiet, verbose, without colours, a dry run."""

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from helpers import ppocli
from runs import Command, imported_by, run, shell, words

from ppocli.cli import output

HEAVY = ("torch", "transformers", "deepspeed", "accelerate", "datasets")


@pytest.fixture
def typed(app: Command, here: Path) -> Command:
    """A command in this process, in an empty folder."""
    return app


def test_the_command_line_and_the_package_import_nothing_heavy(tmp_path):
    assert not imported_by("import ppocli.cli.app", tmp_path) & {*HEAVY, "hydra", "omegaconf"}
    assert not imported_by("import ppocli; ppocli.PPOTrainer; ppocli.Batch", tmp_path) & {
        *HEAVY, "hydra"}
    words = "['+recipe=quickstart', '--cfg', 'job']"
    assert not imported_by(f"from ppocli.cli.train import run_words; run_words({words})",
                           tmp_path) & set(HEAVY)
    completion = "from ppocli.cli.options import complete_word as c; c([], 'p'); c([], 'resume=')"
    assert not imported_by(completion, tmp_path) & {*HEAVY, "hydra"}


def test_help_shows_examples_groups_and_keys(tmp_path):
    done = shell("ppocli train --help", tmp_path)
    assert done.returncode == 0
    for part in ("ppocli train +recipe=quickstart", "Config groups:", "imdb_sentiment|",
                 "model=", "reward=", "hardware=cpu|ddp|gpu|gpu_bf16|zero1",
                 "ppo.total_episodes", "--multirun", "--config-dir"):
        assert part in done.stdout, part


@pytest.mark.parametrize(("words", "said"), [
    (["tran"], "Did you mean 'train'?"),
    (["train", "--multirn"], "Error: unknown option --multirn; did you mean --multirun?"),
    (["recipes", "show", "quickstrat"], "did you mean quickstart?"),
    (["train", "-m", "+recipe=quickstart", "ppo.lrr=1,2"], "ppo.lrr: unknown key"),
])
def test_usage_errors_are_2_on_stderr_without_traceback(words, said, typed):
    done = typed(*words, code=2)
    assert said in done.err
    assert done.out == ""
    assert os.listdir() == []


@pytest.mark.parametrize(("line", "code"), [
    ("ppocli train seed=x 2>&-", 2), ("ppocli recipes show quickstart >/dev/full", 6),
    ("ppocli recipes show quickstart | true; exit ${PIPESTATUS[0]}", 141)])
def test_closed_and_full_streams(line, code, tmp_path):
    done = shell(line, tmp_path)
    assert done.returncode == code
    assert "Traceback" not in done.stderr


def test_recipes_are_listed_shown_and_copied(typed):
    folder = Path("recipes")
    (folder / "folder.yaml").mkdir(parents=True)
    (folder / "latin.yaml").write_bytes(b"# @package _global_\n# caf\xe9\n")
    by_name = {row["name"]: row for row in json.loads(typed("recipes", "list", "--json").out)}
    assert all(row["purpose"] for name, row in by_name.items() if name != "folder")
    assert by_name["latin"]["purpose"].startswith("caf")
    shown = typed("recipes", "show", "quickstart").out
    assert shown == Path(by_name["quickstart"]["file"]).read_text()

    copied = typed("recipes", "copy", "quickstart", "recipes/mine.yaml")
    assert copied.out == "recipes/mine.yaml\n"
    assert "ppocli train +recipe=mine" in copied.err
    again = typed("recipes", "copy", "quickstart", "recipes/mine.yaml", code=2)
    assert "exists already" in again.err
    path = typed("train", "+recipe=mine", "--cfg", "job", "-p", "model.path").out
    assert path.strip() == "builtin:reviews"


# Options before the command, and of ``train``


@pytest.fixture
def manner(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What ``set_manner`` changes in the process is undone."""
    monkeypatch.setattr(output._Manner, "quiet", False)
    monkeypatch.setenv("PPOCLI_DEBUG", "")
    monkeypatch.delenv("NO_COLOR", raising=False)
    yield
    os.environ.pop("NO_COLOR", None)


def test_quiet_training_prints_the_model_and_warnings(world):
    done = ppocli("--quiet", "train", *words("run_name=r", "ppo.num_steps=1"), cwd=world, code=0)
    assert done.stdout == f"{world}/runs/r/model\n"
    log = (world / "runs/r/ppocli.log").read_text()
    warned = [line.split(" WARNING ")[1] for line in log.splitlines() if " WARNING " in line]
    assert done.stderr.splitlines() == [f"warning: {text}" for text in warned]
    assert "INFO step 1/1" in log  # the log has everything


def test_verbose_adds_the_traceback_and_no_color_holds_for_what_is_started(manner, typed):
    typed("train", "seed=x", code=2)
    assert "Traceback" in typed("--no-color", "-v", "train", "seed=x").err
    assert (os.environ["NO_COLOR"], os.environ["PPOCLI_DEBUG"]) == ("1", "1")


NOISY = '''
import atexit, ctypes, os, subprocess, sys, threading

def noise():
    print("NOISE printed")
    sys.stdout.write("NOISE unfinished")
    sys.stdout.buffer.write(b"NOISE bytes\\n")
    os.write(1, b"NOISE descriptor\\n")
    ctypes.CDLL(None).puts(b"NOISE of C")
    subprocess.run(["echo", "NOISE child"], check=True)
    thread = threading.Thread(target=print, args=("NOISE thread",))
    thread.start()
    thread.join()

noise()
atexit.register(noise)

def score(outputs):
    noise()
    return [float(len(text)) for text in outputs]
'''


@pytest.mark.slow
def test_what_code_of_users_prints_never_mixes_with_results(world):
    """Standard output of each command, whole."""
    (world / "noisy.py").write_text(NOISY)
    settings = words("reward.fn=noisy.py:score", "ppo.num_steps=1", "run_name=noisy",
                     "output_dir=out")
    model = run("-q", "train", *settings, cwd=world, code=0)
    assert model.out == f"{world / 'out/noisy/model'}\n"
    # whichever way it was written
    assert {f"NOISE {kind}" for kind in ("printed", "descriptor", "of C", "child", "thread")} \
        <= set(model.err.splitlines())
    done = run("generate", "out/noisy", "-p", "the", "--score", "--json", cwd=world, code=0)
    assert json.loads(done.out)
    assert "NOISE" in done.err
