"""The pages with names of other libraries name only what there is."""

from pathlib import Path

import pytest
from helpers import checked, refused

from ppocli.builtin.names import shipped_table
from ppocli.config.command_words import read_words
from ppocli.config.compose import compose
from ppocli.config.keys import named_elsewhere, schema_keys
from ppocli.errors import ConfigError

DOCS = Path(__file__).parents[2] / "docs"
PAGE = DOCS / "coming-from-trlx-and-trl.md"
TEXT = "".join(page.read_text(encoding="utf-8")
               for page in (PAGE, DOCS / "names-of-verl-and-openrlhf.md"))
def test_every_name_that_is_recognised_is_on_the_page_and_stands_for_a_key():
    table = shipped_table("other_names.yaml")
    assert table.keys() <= schema_keys().keys()
    names = {name for libraries in table.values() for library, many in libraries.items()
             for name in many.split() if library != "other"}
    assert {name for name in names if f"`{name}`" not in TEXT} == set()


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
        "rollout.server_args": "actor_rollout_ref.rollout.tensor_model_parallel_size",
        "model.peft": "lora model.lora lora_alpha", "tracking.trackers": "wandb report_to",
        "ppo.n": "group_size num_generations", "ppo.num_rollouts": "data.train_batch_size",
    }.items() for name in names.split()),
    ("model.value.pth", None, []), ("ppo.lrr", None, [])])
def test_a_name_counts_by_its_last_parts(given, task, ours):
    assert list(named_elsewhere(given, task)) == ours


def test_the_command_answers_with_our_key_and_the_page():
    with refused(ConfigError, "ppo.kl_coef: unknown key; here TRL's kl_coef is ppo.init_kl_coef ",
                 f"trlX's train.total_steps is ppo.num_steps (docs/{PAGE.name})"):
        checked("+recipe=quickstart", "ppo.kl_coef=0.1", "train.total_steps=10")
    with refused(ConfigError, "settings are written without dashes: "
                 "reward_model.optimizer.lr=1e-5"):
        read_words(["task=reward_model", "--learning-rate", "1e-5", "--pretrain", "lm"])
    with refused(ConfigError, "looks like a secret") as error:
        read_words(["--hf_token", "hf_abcdefghijklmnopqrstuvwxyz"])
    assert "abcdefg" not in str(error.value)
