"""The page for those who come from trlX and TRL names only what there is."""

import re
from pathlib import Path

import pytest
from runs import shell
from typer.testing import CliRunner

import ppocli
from ppocli.builtin.names import shipped_table
from ppocli.cli.app import app
from ppocli.config.keys import named_elsewhere, schema_keys

PAGE = Path(__file__).parents[2] / "docs/coming-from-trlx-and-trl.md"
TABLE = re.compile(r"^\|(?!-|\s*trlX)(.+)\|$", re.MULTILINE)
SECTIONS = sorted({key.split(".")[0] for key in schema_keys()})
KEY = re.compile(rf"^(?:{'|'.join(SECTIONS)})(?:\.\w+)*(?==|$)")


def ours() -> list[str]:
    """Everything in code quotes in the third column of the tables."""
    found = []
    for row in TABLE.findall(PAGE.read_text(encoding="utf-8")):
        cells = row.split("|")
        assert len(cells) == 4, row
        found += re.findall(r"`([^`]+)`", cells[2])
    return found


def test_the_tables_are_read():
    assert len(ours()) > 80


@pytest.mark.parametrize("name", sorted(set(ours())))
def test_what_is_named_as_ours_exists(name):
    keys = schema_keys()
    if match := KEY.match(name):
        key, _, value = name.partition("=")
        # that each key is read somewhere, another test holds
        assert match[0] in keys
        choices = keys[key].metadata.get("choices")
        assert not (value and choices) or value in choices or value.startswith(("RUN", "["))
    elif name.startswith("ppocli "):
        given = name.split()
        options = [word for word in given[2:] if word.startswith("--")]
        told = CliRunner().invoke(app, [given[1], "--help"], env={"COLUMNS": "200"})
        assert told.exit_code == 0, told.output
        assert all(option in told.output for option in options)
    elif name.startswith("ppocli."):
        assert hasattr(ppocli, name.removeprefix("ppocli."))
    else:
        # options of commands, values of keys and files of a run
        sources = [*Path(__file__).parents[2].glob("ppocli/**/*.py")]
        assert any(name in path.read_text(encoding="utf-8") for path in sources), name


def test_every_name_that_is_recognised_is_on_the_page_and_stands_for_a_key():
    page = PAGE.read_text(encoding="utf-8")
    table = shipped_table("other_names.yaml")
    assert table.keys() <= schema_keys().keys()
    names = {name for libraries in table.values() for library, many in libraries.items()
             for name in many.split() if library != "other"}
    assert {name for name in names if f"`{name}`" not in page} == set()


@pytest.mark.parametrize(("given", "task", "ours"), [
    ("ppo.learning_rate", None, ["ppo.optimizer.lr"]),
    ("learning_rate", "sft", ["sft.optimizer.lr"]),
    ("reward_model.num_train_epochs", None, ["reward_model.epochs"]),
    ("ppo.batch_size", None, ["ppo.num_rollouts", "ppo.mini_batch_size"]),
    ("train.batch_size", None, ["ppo.mini_batch_size"]),
    ("rollout.response_length", None, ["generation.max_new_tokens"]),
    ("optim.lr", None, ["ppo.optimizer.lr", "ppo.optimizer.value_lr"]),
    ("data.max_response_length", None, ["generation.max_new_tokens"]),
    ("model.value.pth", None, []), ("ppo.lrr", None, [])])
def test_a_name_counts_by_its_last_parts(given, task, ours):
    assert list(named_elsewhere(given, task)) == ours


def test_the_command_answers_with_our_key_and_the_page(tmp_path):
    said = shell("ppocli train +recipe=quickstart ppo.kl_coef=0.1 train.total_steps=10", tmp_path)
    assert said.returncode == 2
    assert "ppo.kl_coef: unknown key; here TRL's kl_coef is ppo.init_kl_coef " in said.stderr
    assert f"trlX's train.total_steps is ppo.num_steps (docs/{PAGE.name})" in said.stderr
    flag = shell("ppocli reward-model --learning-rate 1e-5 --pretrain lm", tmp_path)
    assert flag.returncode == 2
    assert "fix:   settings are written without dashes: reward_model.optimizer.lr=1e-5" \
        in flag.stderr
    secret = shell("ppocli train --hf_token hf_abcdefghijklmnopqrstuvwxyz", tmp_path)
    assert secret.returncode == 2
    assert "abcdefg" not in secret.stderr
