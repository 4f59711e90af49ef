"""What the README and docs/ tell a user to type works, and what they claim about names is true.

Fenced blocks marked ``console`` hold commands behind ``$ ``. A block that follows a line such as
"Save as `name`:" is the content of that file. `make test-all` runs every
command of a page as it is printed, in its order.
"""

import importlib.util
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
from helpers import checked, environment, jsonl, read_json
from warm import Process, begin

from ppocli.config.problems import find_problems

ROOT = Path(__file__).resolve().parents[2]
PAGES = ["README.md", *sorted(str(path.relative_to(ROOT)) for pattern in ("*.md", "learn/*.md")
                              for path in (ROOT / "docs").glob(pattern))]
SMALL = ["ppo.total_episodes=32", "ppo.num_rollouts=16", "ppo.mini_batch_size=8",
         "ppo.ppo_epochs=1", "eval.at_start=false", "prompts.eval.limit=4",
         "prompts.eval.repeat=1", "generation.max_new_tokens=8"]

CONSOLE = re.compile(r"^```console\n(.*?)^```$", re.MULTILINE | re.DOTALL)
SAVED = re.compile(r"^Save as `([\w./-]+)`:\n\n```\w+\n(.*?)^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\((?!https?:)([^)#\s]*)(?:#([\w-]+))?\)")
FIRST_COLUMN = re.compile(r"^\| ((?:`[^`|]+`(?:, )?)+) \|", re.MULTILINE)
FILE_ENDINGS = {"json", "jsonl", "csv", "yaml", "md", "html", "safetensors", "log", "py", "svg"}
PORTING, TEN_LINES = "docs/port-a-script.md", "docs/from-verl-trl-openrlhf.md"
"""pages with commands that need the Hub"""
FOREIGN = {"docs/coming-from-trlx-and-trl.md", "docs/names-of-verl-and-openrlhf.md", TEN_LINES}
"""pages that name keys of other libraries too; a test of its own holds that ours exist"""
WITHOUT_COMMANDS = {"docs/gpu.md", "docs/index.md", "docs/metrics.md", "docs/security.md",
                    "docs/glossary.md", "docs/commands.md", "docs/learn/one-file.md",
                    "docs/names-of-verl-and-openrlhf.md", "docs/verifiable.md"}
NEEDS_A_TERMINAL = {"chat"}
"""commands that can't be typed into a test"""


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


def typed_lines() -> list[str]:
    """Every command of the pages, the recipes' headers and the command's own help, as printed."""
    files = [*PAGES, "CONTRIBUTING.md", *(str(path.relative_to(ROOT)) for pattern in (
        "recipes/*.yaml", "ppocli/cli/*.py") for path in ROOT.glob(pattern))]
    return [line for file in files for line in re.findall(
        r"^(?:\$ |#? +)(ppocli .*)$", re.sub(r"\\{1,2}\n#?", " ", text_of(file)),
        re.MULTILINE)]


def test_commands_mean_the_same_in_bash_and_zsh():
    """zsh expands brackets, a leading ~ or = and parentheses, and has no comments when typed."""
    lines = typed_lines()
    assert len(lines) > 150
    assert [line for line in lines if re.search(r"[\[\]*?{}^#!]|\s(~[^/]|=)|(?<!<)\(", re.sub(
        r"'[^']*'|\"[^\"]*\"", "", line))] == []


def saved_files(page: str) -> dict[str, str]:
    """Name -> content of each file that a page tells to save."""
    return dict(SAVED.findall(text_of(page)))


def trains(command: list[str]) -> bool:
    """Whether a command starts a training run."""
    return command[:2] in (["ppocli", "train"], ["ppocli", "resume"]) and "--cfg" not in command


def typed(command: list[str], folder: Path, forked: bool = False) -> Process:
    """A command that has begun, as that of a user whose virtual environment is active."""
    if forked:
        words = command[1:] if command[0] == "python" else ["-m", *command]
        return begin(words, cwd=folder, env=environment())
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    return subprocess.Popen(command, cwd=folder, env=environment(PATH=path), text=True,
                            stdout=subprocess.PIPE, stderr=subprocess.PIPE)


def type_in(commands: list[list[str]], folder: Path, timeout: float, forked: bool = False) -> None:
    """Run commands one after another. One that ends with ``&`` is a server: it runs beside the
    others until the end, where SIGTERM ends it well."""
    with ExitStack() as servers:
        for command in commands:
            if command[-1] == "&":
                servers.enter_context(in_background(command[:-1], folder))
                continue
            with typed(command, folder, forked) as process:
                out, err = process.communicate(timeout=timeout)
            assert process.returncode == 0, f"{shlex.join(command)}\n{out}\n{err}"
            if trains(command) and "-m" not in command:
                model = Path(out.splitlines()[-1])
                assert ((model / "config.json").is_file()
                        or (model / "adapter_config.json").is_file()), out


@contextmanager
def in_background(command: list[str], folder: Path) -> Iterator[None]:
    """A server, from the first line that it prints."""
    with typed(command, folder) as process:
        try:
            assert process.stdout.readline(), shlex.join(command)
            yield
        finally:
            process.terminate()
            process.communicate(timeout=60)
        assert process.returncode == 0, shlex.join(command)


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


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("page", WITH_COMMANDS)
def test_the_commands_of_a_page_work_as_they_are_printed(page, tmp_path):
    type_in(prepare(page, tmp_path), tmp_path, timeout=1800)


HUB = re.compile(r"^```text\n(ppocli .*?)^```$", re.MULTILINE | re.DOTALL)


@pytest.mark.slow
@pytest.mark.parametrize(("page", "count"), [(PORTING, 4), (TEN_LINES, 10)])
def test_commands_of_those_who_change_over_compose(page, count, tmp_path, monkeypatch):
    """They need the Hub, so they aren't typed in as those of other pages."""
    monkeypatch.chdir(tmp_path)
    lines = [line for block in HUB.findall(text_of(page))
             for line in block.replace("\\\n", " ").splitlines()]
    assert len(lines) == count
    missing = () if importlib.util.find_spec("bitsandbytes") else ("model.quantization=4bit",)
    for line in lines:
        program, command, *words = shlex.split(line)
        assert program == "ppocli"
        assert command in ("train", "vllm-command")
        words = [word for word in words if word not in missing]
        extra = [] if command == "train" else ["run_name=x"]
        assert find_problems(checked(*words, *extra).config) == []


def commands_of_the_program() -> dict[str, set[str]]:
    """Command -> its own commands; what help does not show is left out."""
    import typer.main

    from ppocli.cli.app import app

    def shown(group: object) -> dict[str, object]:
        found = getattr(group, "commands", {})
        return {name: command for name, command in found.items() if not command.hidden}

    return {name: set(shown(command))
            for name, command in shown(typer.main.get_command(app)).items()}


def test_every_page_has_commands_and_every_command_is_typed_somewhere():
    assert set(WITH_COMMANDS) == set(PAGES) - WITHOUT_COMMANDS
    typed = [command for page in PAGES for command in commands_of(page)]
    assert any("-m" in command for command in typed)
    first = {command[1] for command in typed if command[0] == "ppocli"}
    assert set(commands_of_the_program()) - first == NEEDS_A_TERMINAL


def test_every_command_has_a_page_that_the_list_of_commands_names():
    table = dict(re.findall(r"^\| \[`ppocli ([\w-]+)`\]\(([\w./-]+)[^)]*\) \|",
                            text_of("docs/commands.md"), re.MULTILINE))
    commands = commands_of_the_program()
    assert {"train", "eval", "export", "sweep"} <= set(commands)
    assert set(table) == set(commands)
    for name, page in table.items():
        text = text_of(f"docs/{page}")
        for words in [f"ppocli {name}", *(f"ppocli {name} {sub}" for sub in commands[name])]:
            assert re.search(rf"\b{words}\b", text), f"{page}: {words}"


def test_the_readme_is_short_and_the_index_lists_every_page_once():
    assert len(text_of("README.md").splitlines()) <= 100
    trees = re.findall(r"^```\{toctree\}\n(.*?)^```$", text_of("docs/index.md"),
                       re.MULTILINE | re.DOTALL)
    entries = [line for tree in trees for line in tree.splitlines()
               if line and not line.startswith(":")]
    found = [re.sub(r"^.*<(.*)>$", r"\1", entry) for entry in entries]
    assert len(found) == len(set(found))
    files = {f"{name[1:]}.md" if name.startswith("/") else f"docs/{name}.md" for name in found}
    assert set(PAGES) - files == {"docs/index.md"}
    assert all((ROOT / file).is_file() for file in files)


def test_configuration_page_is_up_to_date():
    done = subprocess.run([sys.executable, ROOT / "docs/make_configuration.py"], text=True,
                          capture_output=True, timeout=60, check=True)
    assert text_of("docs/configuration.md") == done.stdout, "make docs"


def test_every_key_named_in_the_docs_exists():
    from ppocli.config.keys import key_for, schema_sections

    sections = "|".join({name.partition(".")[0] for name in schema_sections()})
    key = re.compile(rf"(?<![\w./=:(-])((?:{sections})(?:\.[a-z_]\w*)+)(?![\w/(:])(?!\.\w)")
    for page in (page for page in PAGES if page not in FOREIGN | {"docs/configuration.md"}):
        for name in key.findall(text_of(page)):
            if name.rpartition(".")[2] in FILE_ENDINGS:
                continue
            assert name in schema_sections() or key_for(name) is not None, f"{page}: {name}"


def test_exit_codes_are_those_of_the_errors():
    from ppocli import errors

    rows = re.findall(r"^\| (\d+) \| ", text_of("docs/runs.md"), re.MULTILINE)
    kinds = [kind for kind in vars(errors).values()
             if isinstance(kind, type) and issubclass(kind, errors.PpocliError)]
    assert {int(row) for row in rows} == {0, 130, 143, *(kind.exit_code for kind in kinds)}


def explained() -> set[str]:
    """What stands in the first column of the tables of docs/metrics.md."""
    cells = FIRST_COLUMN.findall(text_of("docs/metrics.md"))
    return {name for cell in cells for name in re.findall(r"`([^`]+)`", cell)}


def without_names(figure: str, names: set[str]) -> str:
    """``reward/praise``, ``eval/metrics/words``, ``cpu/step`` and ``memory/rows/optimize`` as the
    docs have them."""
    prefix, _, last = figure.rpartition("/")
    if prefix in ("memory/rows", "cpu"):
        return f"{prefix}/PHASE"
    return f"{prefix}/NAME" if last in names else figure


LOGS = """
def score(completions, log_metric, **columns):
    log_metric("told", 1.0)
    return [0.0] * len(completions)
"""


def test_every_figure_of_a_run_is_explained_and_no_other(here, command, inject):
    from ppocli.ppo.step_metrics import episode_figures
    from ppocli.runs.episode import Episode, Turn

    (here / "logs.py").write_text(LOGS)
    (here / "texts.txt").write_text("The film was a joy.\n")
    inject("optimize.forward>1:oom")  # the figure of a phase in which memory has run out
    command(
        "model=reviews", "prompts.mix.films.path=builtin:reviews-prompts", "run_name=x", *SMALL,
        "eval.at_start=true", "ppo.ent_coef=0.01", "ppo.ent_coef_end=0", "ppo.kl_in=loss",
        "ppo.dual_clip=3", "ppo.step_kl=0.04", "ppo.positive_nll_coef=0.1",
        "ppo.importance.level=token", "ppo.importance.reject.token_k3=1",
        "ppo.ptx.coef=0.1", "ppo.ptx.data.path=texts.txt",
        "reward.missing_eos_penalty=0.1", "reward.fns.logs.fn=logs.py:score",
        "reward.fns.brief.fn=length", "reward.fns.brief.kwargs.target=8",
        "reward.fns.praise.fn=keyword", "reward.fns.praise.kwargs.words=[great]",
        "reward.metric_fn=ppocli.rewards.randomwalks:metrics", code=0)
    figures = {name for row in jsonl(here / "runs/x/metrics.jsonl") for name in row}
    own = {name.removeprefix("eval/metrics/") for name in figures if "eval/metrics/" in name}
    assert own
    summary = read_json(here / "runs/x/summary.json")
    own |= {"films", "brief", "praise", "logs", "told", "missing_eos"}
    found = {without_names(name, own) for name in figures}
    elsewhere = {"time/gather", "rollout/drawn", "rollout/uniform_groups", "eval/turns_mean",
                 "eval/done_share", *episode_figures([Episode("", (Turn("x", 1),), "done")])}
    assert found | set(summary) | elsewhere == explained()
    left = {path.name for path in (here / "runs/x").iterdir()} - {".lock"}
    files = re.findall(r"`([\w.-]+)/?`", " ".join(FIRST_COLUMN.findall(text_of("docs/runs.md"))))
    assert left <= set(files)


def test_builtin_rewards_are_listed_with_their_arguments():
    import inspect

    from ppocli.builtin.names import BUILTIN_REWARDS
    from ppocli.rewards.resolve import locate_reward

    text = text_of("docs/rewards.md")
    for name in BUILTIN_REWARDS:
        assert f"| `{name}` |" in text
        target = locate_reward(name, key="reward.fn").target
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
