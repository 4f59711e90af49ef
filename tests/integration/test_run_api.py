"""Training from Python: objects in place of words, and what comes back."""

import json
import shutil

import pytest
from helpers import jsonl
from runs import WORDS

import ppocli
from ppocli.config.config_yaml import read_config
from ppocli.errors import CheckpointError, ConfigError, InputError

PROMPTS = ["the film", {"prompt": "i saw", "topic": "plot"}, "it was", "the actor"]
EVAL_PROMPTS = ["we", "you hated"]


def reward(samples, prompts, outputs, topic=None, **kwargs):
    """trlX's signature, with a column."""
    assert topic is None or set(topic) <= {None, "plot"}
    return [float(sample == prompt + output) + output.split().count("good")
            for sample, prompt, output in zip(samples, prompts, outputs, strict=True)]


def measure(outputs, **kwargs):
    return {"words": [float(len(text.split())) for text in outputs]}


@pytest.fixture(scope="module")
def trained(shared_world, tmp_path_factory):
    """One run by objects alone."""
    folder = tmp_path_factory.mktemp("api")
    return ppocli.train(
        [f"model.path={shared_world / 'lm'}", *WORDS, f"output_dir={folder}", "run_name=api",
         "ppo.num_steps=2"],
        reward_fn=reward, metric_fn=measure, prompts=PROMPTS, eval_prompts=EVAL_PROMPTS,
        stop_sequences=["."])


def test_objects_train_and_are_noted(trained):
    assert trained.summary["status"] == "finished"
    assert "metrics/words" in trained.summary["eval_after"]
    config = read_config(trained.run_dir / "config.yaml")
    assert config.reward.fn == "<python object>"
    assert config.generation.stop_sequences == ["."]
    samples = jsonl(trained.run_dir / "samples.jsonl")
    assert {row["prompt"] for row in samples} == {"we", "you hated"}
    assert all("." not in row["response"] for row in samples)


def test_the_policy_generates(trained):
    one = trained.generate(["the film", "it"], seed=1)
    assert trained.generate(["the film", "it"], seed=1) == one
    [greedy] = trained.generate(["the film"], do_sample=False, max_new_tokens=3)
    assert len(greedy.split()) <= 3
    for prompts, sampling, said in (
            (["it"], {"temprature": 2.0}, "temprature"), ("The film", {}, "is no list of texts"),
            (["it"], {"max_new_tokens": "5"}, "it takes a whole number")):
        with pytest.raises(ConfigError, match=said):
            trained.generate(prompts, **sampling)


def test_a_run_is_opened_again(trained, tmp_path):
    again = ppocli.load_run(trained.run_dir)
    assert again.summary == trained.summary
    assert again.generate(["it"], seed=3) == trained.generate(["it"], seed=3)
    with pytest.raises(InputError):
        ppocli.load_run(tmp_path)
    (tmp_path / "summary.json").write_text(json.dumps({"status": "stopped"}))
    shutil.copy(trained.run_dir / "config.yaml", tmp_path)
    with pytest.raises(InputError, match="stopped, not finished") as error:
        ppocli.load_run(tmp_path)
    assert error.value.fix.startswith(f"""ppocli.train(["resume={tmp_path}"], reward_fn=...""")


@pytest.mark.slow
def test_a_run_by_objects_asks_for_them_again(trained):
    more = [f"resume={trained.run_dir}", "ppo.num_steps=3"]
    with pytest.raises(CheckpointError, match="reward_fn, metric_fn, prompts, eval_prompts"):
        ppocli.train(more)
    given = {"reward_fn": reward, "metric_fn": measure, "eval_prompts": EVAL_PROMPTS}
    with pytest.raises(CheckpointError, match="with prompts"):
        ppocli.train(more, **given)
    went_on = ppocli.train(more, **given, prompts=PROMPTS)
    assert went_on.summary["steps"] == 3
    assert [row["step"] for row in jsonl(trained.run_dir / "metrics.jsonl")] == [0, 1, 2, 3]


def test_a_mapping_is_the_words_it_stands_for(monkeypatch):
    """trlX's way to hand settings over: nested, with the model's path beside them."""
    given = {"config": {"recipe": "quickstart", "model": {"path": "elsewhere"}, "seed": 3,
                        "ppo": {"optimizer": {"lr": 1e-4, "betas": [0.9, 0.95]},
                                "total_episodes": None},
                        "reward": {"kwargs": {"label": "a b: {c}"}},
                        "generation": {"stop_sequences": ["\n", "."]}},
             "overrides": ["ppo.num_steps=2"]}
    from ppocli.launch import launch

    class Seen(Exception):
        """The configuration that would have been run."""

    def seen(checked, caller):
        raise Seen(checked.config)

    monkeypatch.setattr(launch, "launch", seen)
    with pytest.raises(Seen) as caught:
        ppocli.train(model_path="some/lm", **given)
    config = caught.value.args[0]
    assert (config.model.path, config.seed, config.ppo.num_steps) == ("some/lm", 3, 2)
    assert (config.ppo.optimizer.lr, config.ppo.optimizer.betas) == (1e-4, [0.9, 0.95])
    assert config.reward.kwargs["label"] == "a b: {c}"
    assert config.generation.stop_sequences == ["\n", "."]
    assert config.ppo.total_episodes is None


def test_arguments_of_a_recipe_s_reward_do_not_reach_the_one_that_replaces_it():
    with pytest.raises(ConfigError, match=r"reward.kwargs.a=1 would go to .*reward_fn replaces"):
        ppocli.train(["+recipe=quickstart", "reward.kwargs.a=1"], reward_fn=reward)


@pytest.mark.parametrize(("call", "name"), [
    (lambda: ppocli.train(prompts="The film"), "prompts"),
    (lambda: ppocli.train(prompts=["it"], eval_prompts="The film"), "eval_prompts"),
    (lambda: ppocli.sft(data="The film"), "data"),
    (lambda: ppocli.evaluate("none", prompts={"prompt": "The film"}), "prompts"),
    (lambda: ppocli.PPOTrainer(prompts="The film"), "prompts")])
def test_one_text_or_mapping_is_no_list_of_them(call, name):
    with pytest.raises(ConfigError, match=f"{name} must be a list, not one ") as caught:
        call()
    assert caught.value.where == name


def test_what_a_script_has_set_torch_to_is_not_the_run_s(shared_world, trained, tmp_path):
    import torch

    torch.set_default_dtype(torch.float64)
    try:
        with torch.inference_mode(), torch.autocast("cpu", dtype=torch.bfloat16):
            run = ppocli.train(
                [f"model.path={shared_world / 'lm'}", *WORDS, f"output_dir={tmp_path}",
                 "ppo.num_steps=2"], reward_fn=reward, metric_fn=measure, prompts=PROMPTS,
                eval_prompts=EVAL_PROMPTS, stop_sequences=["."])
            assert torch.is_autocast_enabled("cpu")
            assert torch.autocast_increment_nesting() == 2
            torch.autocast_decrement_nesting()
        assert torch.get_default_dtype() == torch.float64
    finally:
        torch.set_default_dtype(torch.float32)
    mine, theirs = (jsonl(each.run_dir / "metrics.jsonl")[2] for each in (run, trained))
    for name in ("objective/kl", "loss/policy_avg", "loss/value_avg"):
        assert mine[name] == theirs[name]


def test_weights_rounded_within_a_script_s_autocast_are_those_of_now(shared_world, tmp_path):
    """Torch keeps rounded weights until the outermost context ends, which is the script's."""
    import torch

    def train(name):
        return ppocli.train(
            [f"model.path={shared_world / 'lm'}", *WORDS, f"output_dir={tmp_path}",
             f"run_name={name}", "ppo.num_steps=2", "hardware.precision=bf16"], reward_fn=reward,
            prompts=PROMPTS, eval_prompts=EVAL_PROMPTS)

    apart = train("apart")
    with torch.autocast("cpu", dtype=torch.bfloat16), torch.autocast("cpu", dtype=torch.bfloat16):
        within = train("within")
        assert torch.is_autocast_enabled("cpu")
        assert torch.autocast_increment_nesting() == 3
        torch.autocast_decrement_nesting()
    assert [row["loss/value_avg"] for row in jsonl(within.run_dir / "metrics.jsonl")[1:]] == [
        row["loss/value_avg"] for row in jsonl(apart.run_dir / "metrics.jsonl")[1:]]
