"""The recipes of the whole road, each run reading the one before it, with a few updates; those for
models of the Hub with the built-in ones in their place."""


import pytest
from helpers import ppocli, read_json

DEMONSTRATIONS = ["data.path=builtin:pipeline-sft", "data.limit=64", "sft.num_updates=2",
                  "sft.mini_batch_size=4", "sft.eval_samples=2", "generation.max_new_tokens=8"]
PAIRS = ["data.path=builtin:pipeline-pairs", "data.limit=64", "reward_model.num_updates=2",
         "reward_model.mini_batch_size=4", "reward_model.scheduler.warmup_updates=0"]
PROMPTS = ["prompts.path=builtin:pipeline-sft", "prompts.eval.limit=4", "prompts.eval.repeat=2",
           "generation.max_new_tokens=8", "ppo.num_rollouts=8", "ppo.mini_batch_size=4"]
STEPS = {"pipeline": ["ppo.total_episodes=16"], "tldr": ["ppo.total_episodes=16"],
         "hh": ["ppo.num_steps=2"]}
STAND_INS = {  # where the recipe names a model or columns of the Hub
    "pipeline": ([], [], []),
    "tldr": (["model.path=builtin:reviews", "data.val=0.2"], ["data.val=0.2"],
             ["prompts.max_length=64", "prompts.eval.split=null", "ppo.micro_batch_size=2"]),
    "hh": (["model.path=builtin:reviews", "data.val=0.2", "data.columns.completion=completion"],
           ["data.val=0.2", "model.num_layers_unfrozen=2"],
           ["prompts.max_length=64", "prompts.eval.split=null"])}


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("family", STAND_INS)
def test_the_whole_road_of_a_family_of_recipes(family, tmp_path):
    sft, reward, ppo = STAND_INS[family]
    for words in (["sft", f"+recipe={family}_sft", *DEMONSTRATIONS, *sft],
                  ["reward-model", f"+recipe={family}_reward", *PAIRS, *reward],
                  ["train", f"+recipe={family}_ppo", *PROMPTS, *STEPS[family], *ppo]):
        ppocli(*words, "hardware.device=cpu", "hardware.num_threads=1", cwd=tmp_path, code=0,
               timeout=180)
    runs = {kind: tmp_path / f"runs/{family}-{kind}" for kind in ("sft", "reward", "ppo")}
    assert all((run / "model/config.json").is_file() for run in runs.values())
    accuracy = read_json(runs["reward"] / "summary.json")["eval_after"]["accuracy"]
    assert 0 <= accuracy <= 1
