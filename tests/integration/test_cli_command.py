"""The command as a process: exit codes, wording, what is imported, terminals that go away; and in
this one: quiet, verbose, without colours, a dry run."""

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from helpers import ppocli
from runs import Command, imported_by, run, shell, words
from test_cli_serve import server

from ppocli.cli import output
from ppocli.cli.app import app

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
    (["train", "-m", "+recipe=quickstart,nope"], "unknown recipe nope"),
    (["train", "-m", "+recipe=quickstart", "resume=runs/x"], "this is a sweep"),
])
def test_usage_errors_are_2_on_stderr_without_traceback(words, said, typed):
    done = typed(*words, code=2)
    assert said in done.err
    assert done.out == ""
    assert os.listdir() == []


@pytest.mark.parametrize(("line", "code"), [
    ("ppocli train seed=x 2>&-", 2), ("ppocli recipes show quickstart >/dev/full", 6),
    ("ppocli recipes show quickstart | true; exit ${PIPESTATUS[0]}", 141),
    ("ppocli chat <&-", 2),
    pytest.param("PYTHONIOENCODING=ascii ppocli recipes list --json | python3 -m json.tool", 0,
                 marks=pytest.mark.slow)])
def test_closed_and_full_streams(line, code, tmp_path):
    (tmp_path / "recipes").mkdir()
    (tmp_path / "recipes/caf\u00e9.yaml").write_text("# @package _global_\n")
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
    typed("recipes", "copy", "randomwalks", "recipes/mine.yaml", "--overwrite", code=0)
    path = typed("train", "+recipe=mine", "--cfg", "job", "-p", "model.path").out
    assert path.strip() == "builtin:randomwalks"
    elsewhere = typed("recipes", "copy", "quickstart", "lib/")
    assert elsewhere.out == "lib/quickstart.yaml\n"
    assert "--config-dir lib +recipe=quickstart" in elsewhere.err


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


@pytest.mark.parametrize(("word", "said"), [
    ("--no-progres", "unknown option --no-progres; did you mean --no-progress?"),
    ("--dry-rum", "unknown option --dry-rum; did you mean --dry-run?")])
def test_options_that_are_misspelt_or_misplaced(word, said, command):
    assert said in command(word, code=2).err


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


@pytest.mark.slow
def test_jobs_ranks_and_servers_keep_it_from_results_as_well(world):
    (world / "noisy.py").write_text(NOISY)
    settings = words("reward.fn=noisy.py:score", "ppo.num_steps=1", "eval.at_start=false")
    swept = run("-q", "train", "-m", *settings, "run_name=sweep", "seed=1",
                "hardware.num_processes=2", cwd=world, code=0)
    assert "NOISE" not in swept.out
    assert "NOISE" in swept.err
    with server("reward.fn=noisy.py:score", "--port", "0", cwd=world) as (process, address):
        assert address.startswith("http://")
        process.terminate()
        assert process.communicate()[0] == ""


def test_an_option_has_one_name_and_one_letter_in_all_commands():
    import typer.main

    found: dict[str, list[frozenset[str]]] = {}

    def walk(command: object) -> None:
        for each in getattr(command, "commands", {}).values():
            walk(each)
        for param in command.params:
            for name in param.opts if param.param_type_name == "option" else ():
                found.setdefault(name, []).append(frozenset(param.opts))

    walk(typer.main.get_command(app))
    assert {name: kinds for name, kinds in found.items() if len(set(kinds)) > 1} == {}
    page = (Path(__file__).parents[2] / "docs/commands.md").read_text(encoding="utf-8")
    assert {name for name, kinds in found.items()
            if len(kinds) > 1 and f"`{name}`" not in page} == set()
    assert {"--out", "--force", "--prompts-file"} & set(found) == set()
