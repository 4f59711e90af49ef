"""What the README and docs/ tell a user to type works, and what they claim about names is true.

Fenced blocks marked ``console`` hold commands behind ``$ ``. A block that follows a line such as
"Save as `name`:" is the content of that file. The quick tests run every ``ppocli`` and ``python``
command of a page in its order, with a small training put behind the words of each run, and leave
sweeps out; the slow ones run everything as it is printed.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from helpers import environment

ROOT = Path(__file__).resolve().parents[2]
PAGES = ["README.md", *sorted(f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md"))]
SMALL = ["ppo.total_episodes=32", "ppo.num_rollouts=16", "ppo.mini_batch_size=8",
         "ppo.ppo_epochs=1", "eval.at_start=false", "prompts.eval.limit=4",
         "prompts.eval.repeat=1", "generation.max_new_tokens=8"]
RESUMED = ["ppo.total_episodes=48"]

CONSOLE = re.compile(r"^```console\n(.*?)^```$", re.MULTILINE | re.DOTALL)
SAVED = re.compile(r"^Save as `([\w./-]+)`:\n\n```\w+\n(.*?)^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\((?!https?:)([^)#\s]*)(?:#([\w-]+))?\)")


def text_of(page: str) -> str:
    return (ROOT / page).read_text(encoding="utf-8")


def commands_of(page: str) -> list[list[str]]:
    """The words of every command on a page, in order."""
    found = []
    for block in CONSOLE.findall(text_of(page)):
        for line in block.replace("\\\n", " ").splitlines():
            assert line.startswith("$ "), f"{page}: no command: {line}"
            found.append(shlex.split(line[2:], comments=True))
    return found


def saved_files(page: str) -> dict[str, str]:
    """Name -> content of each file that a page tells to save."""
    return dict(SAVED.findall(text_of(page)))


def trains(command: list[str]) -> bool:
    """Whether a command starts a training run."""
    return command[:2] in (["ppocli", "train"], ["ppocli", "resume"]) and "--cfg" not in command


def shrunk(command: list[str]) -> list[str]:
    if not trains(command):
        return command
    return [*command, *(RESUMED if command[1] == "resume" else SMALL)]


def type_in(commands: list[list[str]], folder: Path, timeout: float) -> None:
    """Run commands one after another, as a user whose virtual environment is active."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    for command in commands:
        done = subprocess.run(command, cwd=folder, env=environment(PATH=path), text=True,
                              capture_output=True, timeout=timeout, check=False)
        assert done.returncode == 0, f"{shlex.join(command)}\n{done.stdout}\n{done.stderr}"
        if trains(command) and "-m" not in command:
            model = Path(done.stdout.splitlines()[-1])
            assert (model / "config.json").is_file(), done.stdout


def prepare(page: str, folder: Path) -> list[list[str]]:
    """Save a page's files; returns those of its commands that work in any folder."""
    for name, content in saved_files(page).items():
        target = folder / name
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(content, encoding="utf-8")
    commands = commands_of(page)
    programs = {command[0] for command in commands}
    assert programs <= {"ppocli", "python", "make", "git", "tensorboard"}, programs
    return [command for command in commands if command[0] in ("ppocli", "python")]


WITH_COMMANDS = [page for page in PAGES
                 if any(command[0] in ("ppocli", "python") for command in commands_of(page))]


@pytest.mark.timeout(600)
@pytest.mark.parametrize("page", WITH_COMMANDS)
def test_the_commands_of_a_page_work(page, tmp_path):
    commands = [shrunk(command) for command in prepare(page, tmp_path) if "-m" not in command]
    type_in(commands, tmp_path, timeout=240)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("page", WITH_COMMANDS)
def test_the_commands_of_a_page_work_as_they_are_printed(page, tmp_path):
    type_in(prepare(page, tmp_path), tmp_path, timeout=1800)


def test_there_are_commands_to_test():
    typed = [command for page in PAGES for command in commands_of(page)]
    assert {"README.md", "docs/rewards.md", "docs/prompts.md", "docs/recipes.md", "docs/runs.md",
            "docs/configuration.md"} <= set(WITH_COMMANDS)
    assert {"train", "resume", "recipes"} <= {c[1] for c in typed if c[0] == "ppocli"}
    assert any("-m" in command for command in typed)


def test_make_has_the_targets_that_are_named():
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = set(re.findall(r"^([a-z-]+):.*## ", makefile, re.MULTILINE))
    named = {match for page in [*PAGES, "CONTRIBUTING.md"]
             for match in re.findall(r"\bmake ([a-z]+(?:-[a-z]+)*)(?=[`\s])", text_of(page))
             if f"`make {match}" in text_of(page) or f"$ make {match}" in text_of(page)}
    assert {"quickstart", "test", "lint"} <= named <= targets


def test_configuration_page_is_up_to_date():
    done = subprocess.run([sys.executable, "docs/make_configuration.py"], cwd=ROOT, text=True,
                          capture_output=True, timeout=60, check=True)
    assert text_of("docs/configuration.md") == done.stdout, "make docs"


def test_every_key_named_in_the_docs_exists():
    from ppocli.config.keys import key_for, schema_sections

    sections = "|".join({name.partition(".")[0] for name in schema_sections()})
    key = re.compile(rf"(?<![\w./=:(])((?:{sections})(?:\.[a-z_]\w*)+)(?![\w/(:])(?!\.\w)")
    for page in (page for page in PAGES if page != "docs/configuration.md"):
        for name in key.findall(text_of(page)):
            if name.rpartition(".")[2] in ("json", "jsonl", "csv", "yaml"):
                continue
            assert name in schema_sections() or key_for(name) is not None, f"{page}: {name}"


def test_exit_codes_are_those_of_the_errors():
    from ppocli import errors

    rows = re.findall(r"^\| (\d+) \| ", text_of("docs/runs.md"), re.MULTILINE)
    kinds = [kind for kind in vars(errors).values()
             if isinstance(kind, type) and issubclass(kind, errors.PpocliError)]
    assert {int(row) for row in rows} == {0, 130, 143, *(kind.exit_code for kind in kinds)}


def test_every_metric_of_a_run_is_explained(tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "ppocli", "train", "+recipe=quickstart", "run_name=x", *SMALL,
         "reward.metric_fn=ppocli.rewards.randomwalks:metrics"], cwd=tmp_path, text=True,
        capture_output=True, env=environment(), timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    rows = (tmp_path / "runs/x/metrics.jsonl").read_text(encoding="utf-8").splitlines()
    names = {name for row in rows for name in json.loads(row)}
    text = text_of("docs/runs.md")
    table = set(re.findall(r"`([\w/.]+)`", text))
    families = ("time/", "tokens_per_second/", "eval/metrics/", "eval/reward/")
    assert {n for n in names if not n.startswith(families) and n not in table} == set()
    summary = json.loads((tmp_path / "runs/x/summary.json").read_text(encoding="utf-8"))
    assert set(summary) - {"run_id", *table} == set()
    left = {path.name for path in (tmp_path / "runs/x").iterdir()} - {".lock"}
    assert left == {"config.yaml", "metrics.jsonl", "samples.jsonl", "events", "summary.json",
                    "checkpoints", "model", "ppocli.log", "run.json"}


def test_builtin_rewards_are_listed_with_their_arguments():
    import inspect

    from ppocli.rewards.builtin import BUILTIN_REWARDS
    from ppocli.rewards.locate import locate

    text = text_of("docs/rewards.md")
    for name in BUILTIN_REWARDS:
        assert f"| `{name}` |" in text
        target = locate(name, key="reward.fn").target
        if inspect.isclass(target):
            for argument in inspect.signature(target).parameters:
                assert f"`{argument}`" in text, f"{name}: {argument}"


@pytest.mark.parametrize("page", [*PAGES, "CONTRIBUTING.md"])
def test_links_lead_somewhere(page):
    for target, anchor in LINK.findall(text_of(page)):
        file = (ROOT / page).parent / target if target else ROOT / page
        assert file.exists(), f"{page}: {target}"
        if anchor:
            headings = re.findall(r"^#+ (.*)$", file.read_text(encoding="utf-8"), re.MULTILINE)
            slugs = {re.sub(r"[^\w -]", "", h).strip().lower().replace(" ", "-") for h in headings}
            assert anchor in slugs, f"{page}: {target}#{anchor}"
