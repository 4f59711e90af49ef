"""The pages with names of other libraries name only what there is."""

import re
from pathlib import Path

import pytest
from helpers import checked, refused
from typer.testing import CliRunner

import ppocli
from ppocli.builtin.names import shipped_table
from ppocli.cli.app import app
from ppocli.config.command_words import read_words
from ppocli.config.compose import compose
from ppocli.config.keys import named_elsewhere, schema_keys
from ppocli.errors import ConfigError

DOCS = Path(__file__).parents[2] / "docs"
PAGE = DOCS / "coming-from-trlx-and-trl.md"
TEXT = "".join(page.read_text(encoding="utf-8")
               for page in (PAGE, DOCS / "names-of-verl-and-openrlhf.md"))
TABLE = re.compile(r"^\|(?!-|\s*trlX)(.+)\|$", re.MULTILINE)
SECTIONS = sorted({key.split(".")[0] for key in schema_keys()})
KEY = re.compile(rf"^(?:{'|'.join(SECTIONS)})(?:\.\w+)*(?==|$)")


def ours() -> list[str]:
    """Everything in code quotes in the last column but one of the tables."""
    names = []
    for row in TABLE.findall(TEXT):
        cells = row.split("|")
        assert len(cells) in (3, 4), row
        names += re.findall(r"`([^`]+)`", cells[-2])
    return names


def test_what_is_named_as_ours_exists():
    names = set(ours())
    assert len(names) > 80
    sources = "".join(path.read_text(encoding="utf-8")
                      for path in Path(__file__).parents[2].glob("ppocli/**/*.py"))
    for name in sorted(names):
        assert_exists(name, sources)


def assert_exists(name: str, sources: str) -> None:
    """A key with its value, a command with its options, a name of the package, or else a text that
    the package's sources hold: an option, a value, a file of a run."""
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
        assert name in sources, name


def test_every_name_that_is_recognised_is_on_the_page_and_stands_for_a_key():
    table = shipped_table("other_names.yaml")
    assert table.keys() <= schema_keys().keys()
    names = {name for libraries in table.values() for library, many in libraries.items()
             for name in many.split() if library != "other"}
    assert {name for name in names if f"`{name}`" not in TEXT} == set()


def test_what_differs_is_told_of_names_and_keys_that_there_are():
    table = shipped_table("other_names.yaml")
    names = {name for libraries in table.values() for many in libraries.values()
             for name in many.split()}
    assert shipped_table("other_names_differ.yaml").keys() <= names | table.keys()


@pytest.mark.parametrize(("name", "group"), [
    ("GRPO", "ppo"), ("rloo", "+recipe"), ("gspo", "task")])
def test_an_algorithm_that_is_no_option_is_answered_with_its_key(name, group):
    key = "policy_loss" if name == "gspo" else "advantage"
    with refused(ConfigError, f"{name}", f"fix:   ppo.{key}={name.lower()}"):
        compose(read_words([f"{group}={name}"]))


@pytest.mark.parametrize(("given", "task", "ours"), [
    ("ppo.learning_rate", None, ["ppo.optimizer.lr"]),
    ("learning_rate", "sft", ["sft.optimizer.lr"]),
    ("reward_model.num_train_epochs", None, ["reward_model.epochs"]),
    ("ppo.batch_size", None, ["ppo.num_rollouts", "ppo.mini_batch_size"]),
    ("train.batch_size", None, ["ppo.mini_batch_size"]),
    ("rollout.response_length", None, ["generation.max_new_tokens"]),
    ("optim.lr", None, ["ppo.optimizer.lr", "ppo.optimizer.value_lr"]),
    ("data.max_response_length", None, ["generation.max_new_tokens"]),
    *((name, None, [key]) for key, names in {
        "rollout.engine": "use_vllm generation.use_vllm", "rollout.launch": "vllm_mode",
        "rollout.server_args": "gpu_memory_utilization tensor_model_parallel_size "
        "vllm_gpu_memory_utilization actor_rollout_ref.rollout.tensor_model_parallel_size",
        "model.peft": "lora model.lora lora.r lora_alpha", "tracking.trackers": "wandb report_to",
        "ppo.init_kl_coef": "kl_beta ppo.kl_beta beta", "tracking.project": "wandb.project",
        "ppo.n": "group_size ppo.group_size num_generations n_samples_per_prompt",
        "ppo.advantage": "tasks.adv_estimator advantage_estimator algorithm",
        "ppo.num_rollouts": "data.train_batch_size rollout_batch_size",
    }.items() for name in names.split()),
    ("model.value.pth", None, []), ("ppo.lrr", None, [])])
def test_a_name_counts_by_its_last_parts(given, task, ours):
    assert list(named_elsewhere(given, task)) == ours


def test_the_command_answers_with_our_key_and_the_page():
    with refused(ConfigError, "ppo.kl_coef: unknown key; here TRL's kl_coef is ppo.init_kl_coef ",
                 f"trlX's train.total_steps is ppo.num_steps (docs/{PAGE.name})"):
        checked("+recipe=quickstart", "ppo.kl_coef=0.1", "train.total_steps=10")
    with refused(ConfigError, "ppo.num_rollouts (times ppo.n: verl counts prompts",
                 "lora is model.peft (a mapping: model.peft.type=lora",
                 "TRL's beta is ppo.init_kl_coef (with ppo.kl_in=loss)"):
        checked("+recipe=quickstart", "data.train_batch_size=8", "lora=true", "beta=0.04")
    with refused(ConfigError, "settings are written without dashes: "
                 "reward_model.optimizer.lr=1e-5"):
        read_words(["task=reward_model", "--learning-rate", "1e-5", "--pretrain", "lm"])
    with refused(ConfigError, "looks like a secret") as error:
        read_words(["--hf_token", "hf_abcdefghijklmnopqrstuvwxyz"])
    assert "abcdefg" not in str(error.value)
