"""Words, recipes and config files to a configuration, through Hydra, in this process."""

import os
from operator import attrgetter
from pathlib import Path

import pytest
import yaml
from helpers import checked

from ppocli.builtin.names import config_groups, recipe_files
from ppocli.config.command_words import read_words
from ppocli.config.compose import Composed, compose, print_composition
from ppocli.config.tasks import task_name
from ppocli.errors import CheckpointError, ConfigError
from ppocli.rewards.scoring import check_reward_config
from ppocli.runs.run_folder import write_config

RUNNABLE = ["model.path=lm", "prompts.path=p.txt", "reward.fn=length", "ppo.num_steps=1"]


@pytest.fixture(autouse=True)
def _own_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def composed(*words: str) -> Composed:
    return compose(read_words(words))


def values(*words: str):
    return composed(*words).values()


def printed(*words: str) -> None:
    print_composition(read_words(words))


def refused(*words: str) -> str:
    with pytest.raises(ConfigError) as error:
        (printed if "--cfg" in words else checked)(*words)
    assert error.value.exit_code == 2
    return str(error.value)


def write(path: str, text: str) -> Path:
    file = Path(path)
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)
    return file


@pytest.mark.parametrize("name", list(recipe_files()))
def test_every_shipped_recipe_composes_without_problems(name):
    composition = checked(f"+recipe={name}")
    assert composition.name == name
    config = composition.config
    if task_name(config) == "ppo":
        check_reward_config(config.reward, None)


def test_every_shipped_group_option_composes():
    """One of each group at a time."""
    plain, groups = values(), config_groups()
    for number in range(max(map(len, groups.values()))):
        chosen = [f"{group}={list(options)[number % len(options)]}"
                  for group, options in groups.items()]
        assert values(*chosen) != plain, chosen


def test_the_recipe_is_below_the_command_line_whatever_the_order():
    for words in (["seed=5", "recipe=quickstart", "ppo.init_kl_coef=0.7"],
                  ["ppo.init_kl_coef=0.7", "+recipe=quickstart", "seed=5"]):
        config = checked(*words).config
        assert (config.seed, config.ppo.init_kl_coef, config.model.path) == (
            5, 0.7, "builtin:reviews")


def test_files_and_defaults_give_way_to_typed_words_that_they_contradict():
    ppo = checked("+recipe=quickstart", "ppo.num_steps=2", "ppo.num_rollouts=24").config.ppo
    assert (ppo.num_steps, ppo.total_episodes, ppo.mini_batch_size) == (2, None, 24)
    short = checked("+recipe=quickstart", "generation.max_new_tokens=4").config.reward
    assert (short.min_response_length, short.min_response_penalty) == (4, 0.035)
    assert checked("+recipe=quickstart", "reward=null", "reward.fn=length",
                   "reward.kwargs.target=9").config.reward.min_response_length is None
    assert "contradict each other" in refused("+recipe=quickstart", "ppo.num_steps=2",
                                              "ppo.total_episodes=64")
    assert "mini_batch_size 32 must be at most num_rollouts 24" in refused(
        "+recipe=quickstart", "ppo.mini_batch_size=32", "ppo.num_rollouts=24")
    sft = checked("+recipe=arithmetic_sft", "sft.num_updates=3").config.sft
    assert (sft.epochs, sft.num_updates) == (None, 3)


def test_groups_are_chosen_added_and_removed():
    assert checked(*RUNNABLE, "ppo=trl").config.ppo.kl_controller == "adaptive"
    assert checked("+recipe=imdb_sentiment").config.ppo.max_grad_norm is None
    assert checked("+recipe=imdb_sentiment", "ppo=null").config.ppo.max_grad_norm == 1.0


ALIKE = {"ppo_epochs": 4, "gamma": 1.0, "lam": 0.95, "cliprange": 0.2, "cliprange_value": 0.2,
         "whiten_rewards": False, "max_grad_norm": None, "target_kl": None,
         "kl_controller": "fixed", "optimizer.eps": 1e-8, "scheduler.warmup_updates": 0}
"""what the defaults of trlX and of TRL's two trainers have in common, but for what is said below"""


def test_a_recipe_that_goes_over_a_preset_says_so():
    note, = composed("+recipe=quickstart", "ppo=trlx").notes
    assert "recipes/quickstart.yaml goes over ppo=trlx: ppo.init_kl_coef=0.05 (not 0.001), " in note
    assert "betas" not in note  # which the recipe leaves alone
    assert composed(*RUNNABLE, "ppo=trlx", "ppo.optimizer.lr=1e-4").notes == ()


@pytest.mark.parametrize(("option", "defaults"), [
    # trl@v0.11.4: trl/trainer/ppo_config.py
    ("trl", {"num_rollouts": 128, "mini_batch_size": 128, "kl_controller": "adaptive",
             "init_kl_coef": 0.2, "target": 6.0, "horizon": 10000, "vf_coef": 0.1,
             "ratio_threshold": 10.0, "optimizer.lr": 1.41e-5, "scheduler.name": "constant"}),
    # trl@f2cd577: trl/experimental/ppo/ppo_config.py; transformers' TrainingArguments
    ("trl_experimental", {"num_rollouts": 8, "mini_batch_size": 8, "micro_batch_size": 8,
                          "init_kl_coef": 0.05, "vf_coef": 0.1, "ratio_threshold": None,
                          "optimizer.lr": 3e-6, "optimizer.betas": [0.9, 0.999],
                          "optimizer.weight_decay": 0.0, "scheduler.name": "linear"}),
    # trlx@3340c2f: trlx/data/default_configs.py
    ("trlx", {"num_rollouts": 128, "mini_batch_size": 32, "init_kl_coef": 0.001, "vf_coef": 1.0,
              "ratio_threshold": None, "optimizer.lr": 3e-5, "optimizer.betas": [0.9, 0.95],
              "optimizer.weight_decay": 1e-6, "scheduler.name": "constant"})])
def test_presets_are_the_defaults_of_their_libraries(option, defaults):
    ppo = checked(*RUNNABLE, f"ppo={option}").config.ppo
    expected = ALIKE | defaults
    assert {name: attrgetter(name)(ppo) for name in expected} == expected


def test_the_only_minibatch_of_a_rollout_grows_with_it():
    config = checked(*RUNNABLE, "ppo=trl_experimental", "ppo.num_rollouts=64").config.ppo
    assert (config.mini_batch_size, config.micro_batch_size) == (64, 8)


def test_free_mappings_take_new_keys_without_plus():
    config = checked(*RUNNABLE, "reward.fn=null", "reward.fns.a={fn: length, weight: 0.5}",
                      "reward.fns.b.fn=keyword", "reward.fns.b.kwargs.words=[x,y]").config
    assert config.reward.fns == {"a": {"fn": "length", "weight": 0.5},
                                 "b": {"fn": "keyword", "kwargs": {"words": ["x", "y"]}}}
    assert "label" not in checked("+recipe=quickstart", "~reward.kwargs.label").config.reward.kwargs


def test_an_empty_mapping_empties_one():
    config = checked("+recipe=quickstart", "model.peft.type=lora", "model.peft={}",
                     "reward.fns.a={fn: length}", "reward.fns={}", "reward.kwargs={}",
                     "reward.kwargs.x={y:1}", "reward.kwargs.x={}").config
    assert (config.model.peft, config.reward.fns, config.reward.kwargs) == ({}, {}, {"x": {}})


def test_interpolations_are_resolved():
    config = checked(*RUNNABLE, "ppo.mini_batch_size=${ppo.num_rollouts}",
                     "run_name=${now:%Y}").config
    assert config.ppo.mini_batch_size == 128
    assert int(config.run_name) > 2000


def test_own_recipes_come_before_the_shipped_ones():
    write("recipes/quickstart.yaml", "seed: 77\n")
    write("recipes/mine.yaml", "defaults:\n  - override /model: reviews\nseed: 78\n")
    assert values("+recipe=quickstart").seed == 77
    mine = values("recipe=mine")
    assert (mine.seed, mine.model.path) == (78, "builtin:reviews")


def test_config_dirs_hold_recipes():
    write("lib/mine.yaml", "# @package _global_\nseed: 9\n")
    assert values("--config-dir", "lib", "+recipe=mine").seed == 9
    write("lib/recipe/deep/down.yaml", "# @package _global_\nseed: 11\n")
    deep = composed("--config-dir", "lib", "+recipe=deep/down")
    assert (deep.values().seed, deep.name) == (11, "down")


def test_printing_composes_nothing(capsys):
    printed("+recipe=quickstart", "--cfg", "job", "-p", "model")
    assert capsys.readouterr().out.startswith("path: builtin:reviews\n")
    printed("--cfg", "job")  # a mandatory value may still be missing
    assert "path: ???" in capsys.readouterr().out
    with pytest.raises(ConfigError, match="only print"):
        checked("--cfg", "job")


def test_each_wrong_word_has_its_problem():
    texts = {
        "ppo.lrr=1": "ppo.lrr: unknown key; did you mean ppo.optimizer.lr? (from command line)",
        "modl=reviews": "modl: unknown key; did you mean model?",
        "seed=abc": "seed: abc must be a whole number (from command line)",
        "+seed=3": "seed: there is such an item already, + can't add it: leave the + out",
        "ppo.gamma=x": "ppo.gamma: x must be a number",
        "ppo.lam=nan": "ppo.lam: nan must be a finite number",
        "generation.temperature=[0.5,1]": "to try several values: -m generation.temperature=0.5,1",
        "reward.kwargs=3": "reward.kwargs: 3 must be a mapping",
        "~ppo.n": "ppo.n: a key can't be removed",
        "~reward.kwargs.nope": "reward.kwargs.nope: can't be removed: there is no such item",
        "ppo.epochs=${nope}": "ppo.epochs: can't be resolved: Interpolation key 'nope' not found",
        "hydra.sweep.nope=1": "hydra.sweep.nope: unknown key"}
    message = refused("+recipe=quickstart", *texts)
    assert [text for text in texts.values() if text not in message] == [], message


@pytest.mark.parametrize(("words", "said"), [
    (["seed=1,2"], "seed=1,2: several values, but this is a single run"),
    (["seed=[1"], "'seed=[1' can't be read as key=value"),
    (["quickstart"], "'quickstart' is not a setting"),
    (["+recipe=quickstrat"], "unknown recipe quickstrat; did you mean quickstart?"),
    (["+recipe=quickstart", "+recipe=randomwalks"], "recipe was given more than once"),
    (["model=reviewz"], "unknown option of the config group model: reviewz; did you mean reviews?"),
    (["model=builtin:reviews"], "write model.path=builtin:reviews"),
])
def test_bad_words_are_refused(words, said):
    start = [] if any("recipe=" in word for word in words) else ["+recipe=quickstart"]
    message = refused(*start, *words)
    assert said in message
    assert "Traceback" not in message
    assert "hydra.cc" not in message
    assert os.listdir() == []


def test_a_recipe_that_forgets_to_override_is_told_how():
    write("recipes/mine.yaml", "# @package _global_\ndefaults:\n  - /model: reviews\n")
    message = refused("+recipe=mine")
    assert "a recipe's defaults say `- override /model: NAME`" in message


def test_all_problems_are_reported_at_once_with_their_sources():
    write("recipes/mine.yaml", "# @package _global_\ndefaults:\n  - override /model: reviews\n\n"
                               "ppo:\n  mini_batch_size: 500\n")
    lines = refused("+recipe=mine", "reward.fn=length", "ppo.num_steps=2", "seed=-1", "ppo.lrr=3",
                    "ppo.lam=wide", "~ppo.n", "ppo.optimizer={lr:x}").splitlines()
    assert lines[0] == "6 problems in the configuration:"
    assert [line.split(":")[0].strip() for line in lines[1:]] == [
        "ppo.lrr", "ppo.lam", "ppo.n", "ppo.optimizer.lr", "seed",
        "ppo.mini_batch_size, ppo.num_rollouts"]
    assert [line.rpartition("(")[2] for line in lines[1:]] == [
        *["from command line)"] * 5, "from recipes/mine.yaml)"]


@pytest.mark.parametrize(("text", "said"), [
    ("seed: [1\n", "recipes/mine.yaml:2"), ("seed: 1\nseed: 2\n", "duplicate key"),
    ("defaults:\n  - override /modl: x\n", "there is no config group modl; did you mean model?"),
    ("resume: runs/x\n", "a run folder goes on the command line only")])
def test_bad_recipes_name_file_and_line(text, said):
    write("recipes/mine.yaml", text)
    assert said in refused("+recipe=mine", *RUNNABLE)


def test_what_would_be_refused_is_printed_with_the_refusal(capsys):
    printed(*RUNNABLE, "ppo.advantage=grpo", "--cfg", "job")
    out, err = capsys.readouterr()
    assert yaml.safe_load(out)["model"]["path"] == "lm"
    assert err.startswith("ppocli train refuses this: ")
    assert "ppo.advantage, ppo.n: grpo compares samples" in err


def test_nothing_given_points_to_a_recipe():
    message = refused()
    assert "model.path: missing" in message
    assert "ppocli train +recipe=quickstart" in message


def test_a_resumed_run_is_its_own_base(tmp_path):
    run = tmp_path / "runs" / "a b"
    run.mkdir(parents=True)
    write_config(checked("+recipe=quickstart", "seed=7", "reward.kwargs.x=1").config,
                 run / "config.yaml")
    write("recipes/config.yaml", "seed: 1000\n")  # must not be taken for the run's
    composition = composed("resume=runs/a b", "ppo.total_episodes=9999")
    assert composition.resume_from == run
    assert (composition.config.seed, composition.config.ppo.total_episodes,
            composition.config.reward.kwargs["x"]) == (7, 9999, 1)
    assert "unknown key" in refused("resume=runs/a b", "ppo.nope=1")
    assert "can't be set when a run is resumed" in refused("resume=runs/a b", "model=reviews")


@pytest.mark.parametrize(("made", "said"), [
    (False, "there is no such folder"), (True, "has no config.yaml: it is not a run folder")])
def test_resume_needs_a_run_folder(made, said):
    if made:
        Path("runs/x").mkdir(parents=True)
    with pytest.raises(CheckpointError) as error:
        composed("resume=runs/x")
    assert said in str(error.value)
    assert error.value.exit_code == 5
