"""Rewards as they are written for trlX, TRL, verl and OpenRLHF: signatures, arguments and answers
of the libraries' own published examples, here and behind an address."""

import json
import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from data_tokenizers import CHATML, utf8_bytes, words
from helpers import jsonl, refused, serving_reward
from runs import words as run_words

from ppocli.config import config_yaml
from ppocli.config.schema import ModelConfig, PromptsConfig, RewardConfig
from ppocli.data.prompt_set import load_prompts
from ppocli.errors import RewardError
from ppocli.models.loading.tokenizer import load_tokenizer
from ppocli.rewards.reward_records import RewardRequest
from ppocli.rewards.scoring import build_reward, with_styles

EXAMPLES = Path(__file__).parents[1] / "fixtures/elsewhere_rewards.py"


def example(name: str) -> str:
    return f"{EXAMPLES}:{name}"


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return load_tokenizer(ModelConfig(path="builtin:reviews"))


def request(tokenizer: Any, texts: list[str], ended: list[bool] | None = None, **more: Any
            ) -> RewardRequest:
    """Responses in the tokenizer's own tokens, with EOS behind those that ended."""
    ended = ended or [True] * len(texts)
    ids = [tokenizer(text, add_special_tokens=False)["input_ids"] + [tokenizer.eos_token_id] * end
           for text, end in zip(texts, ended, strict=True)]
    given: dict[str, Any] = {"columns": {}, **more}
    return RewardRequest(["The film"] * len(texts), texts, ids, tokenizer=tokenizer, ended=ended,
                         **given)


STYLES = {"dense_reward_fn": "trlx", "think_format_reward": "trl", "logging_reward": "trl",
          "soft_overlong": "trl", "compute_score": "verl", "my_reward_fn": "verl",
          "reward_func": "openrlhf", "sentiment": "ppocli", "mixture": "ppocli"}


@pytest.mark.parametrize("name", STYLES)
def test_a_style_is_told_by_the_signature_and_can_be_named(name):
    assert with_styles(RewardConfig(fn=example(name))).style == STYLES[name]
    assert with_styles(RewardConfig(fn=example(name), style="trl")).style == "trl"
    assert with_styles(RewardConfig(fn=example(name), style="ppocli")).style == "ppocli"


def test_dense_numbers_go_where_the_text_of_their_token_ends():
    tok = utf8_bytes()  # a token a byte
    text = "was né"
    ids = tok(text)["input_ids"]

    def each(samples, prompts, outputs, tokenizer):
        return [[float(i + 1) for i in range(len(tokenizer(out)["input_ids"]))] for out in outputs]

    reward = build_reward(RewardConfig(), reward_fn=each)
    whole = request(tok, [text])
    assert reward.score(whole).dense == [[1, 2, 3, 4, 5, 6, 7, 8]]
    # trimmed at a stop sequence of three tokens: EOS is the end of what was sampled
    stop = RewardRequest(["p"], [text], [[*ids, *tok("###")["input_ids"]]], {}, tok, ended=[True])
    assert reward.score(stop).dense == [[1, 2, 3, 4, 5, 6, 7, 0, 0, 8]]
    # a tokenizer that puts a token in front of every text: its number is the first token's
    front = words(front=True)
    asked = request(front, ["the film"])
    assert reward.score(asked).dense == [[1 + 2, 3, 4]]


def test_trlx_dense_example(tokenizer):
    texts = [" was a truly wonderful film.", " was a truly wonderful film.", ""]
    asked = request(tokenizer, texts, [True, False, True])
    found = build_reward(RewardConfig(fn=example("dense_reward_fn"))).score(asked)
    assert found.dense == [[0, 0, 0, 0.25, 0, 0, 1.0], [0, 0, 0, 0.25, 0, 1.0], [1.0]]
    # as it was: the EOS text is not there, and the lists are too short
    with refused(RewardError, "a list of 6 numbers, but the response has 7 tokens"):
        build_reward(RewardConfig(fn=example("dense_reward_fn"), style="ppocli")).score(
            request(tokenizer, texts[:1]))


def test_a_bonus_for_the_end_of_text_is_given_as_trlx_gives_it(tokenizer):
    def bonus(samples, prompts, outputs, tokenizer, **kwargs):
        assert samples == [p + o for p, o in zip(prompts, outputs, strict=True)]
        return [float(output.endswith(tokenizer.eos_token)) for output in outputs]

    seen = []

    def trimmed(samples, prompts, outputs, tokenizer):
        seen.extend(outputs)
        return [0.0] * len(outputs)

    asked = request(tokenizer, [" good", " bad"], [True, False])
    assert build_reward(RewardConfig(), reward_fn=bonus).score(asked).scores == [1.0, 0.0]
    # one that was trimmed at a stop sequence loses the white space before it; another does not
    stopped = replace(asked, responses=[" good \n", " bad \n"], ended=[True, True], response_ids=[
        asked.response_ids[0], [*asked.response_ids[1], 40]])
    build_reward(RewardConfig(), reward_fn=trimmed).score(stopped)
    assert seen == [" good \n<eos>", " bad<eos>"]


def test_conversations_reach_a_function_of_trls_as_messages():
    tok = words(chat=CHATML)
    said = [{"role": "user", "content": "the film"}, {"role": "assistant", "content": "good"},
            {"role": "user", "content": "you ?"}]
    items = [{"prompt": "it was"}, {"prompt": said}]
    found = load_prompts(PromptsConfig(items=items, chat=True, shuffle=False), tok, seed=0,
                         max_prompt_tokens=64)
    batch = found.batch([1, 0], [0, 1], 0).rows([0, 1])
    seen: list[Any] = []

    def format_reward(prompts, completions, **kwargs):
        seen.extend(zip(prompts, completions, strict=True))
        return [float(c[0]["content"] == "good") for c in completions]

    asked = RewardRequest(batch.texts, ["good", "bad"], [[5], [6]], {}, tok,
                          messages=batch.messages)
    reward = build_reward(RewardConfig(), reward_fn=format_reward)
    assert reward.score(asked).scores == [1.0, 0.0]
    assert seen[0] == (said, [{"role": "assistant", "content": "good"}])
    assert seen[1][0] == [{"role": "user", "content": "it was"}]

    # plain prompts stay texts
    plain = load_prompts(PromptsConfig(items=items[:1]), tok, seed=0, max_prompt_tokens=64)
    assert plain.batch([0], [0], 0).messages == []


def test_trl_state_and_logs(tokenizer):
    asked = request(tokenizer, [r" \boxed{2}", " none"], columns={"ground_truth": ["2", "5"]},
                    progress=(3, 10, 1.5))
    reward = build_reward(RewardConfig(fn=example("logging_reward")))
    found = reward.score(asked)
    assert found.scores == [1.3, 0.3]
    assert found.logs == [
        {"extra": {"golden": "2", "found": "2"}, "logged": {"accuracy": 0.5}},
        {"extra": {"golden": "5", "found": "[none]"}, "logged": {"accuracy": 0.5}}]

    def states(completions, trainer_state):
        assert (trainer_state.epoch, trainer_state.num_train_epochs) == (1.5, 5)
        return [1.0] * len(completions)

    build_reward(RewardConfig(), reward_fn=states).score(asked)


VERL = {"data_source": ["openai/gsm8k"] * 2,
        "reward_model": [{"style": "rule", "ground_truth": "72"}] * 2,
        "extra_info": [{"split": "train", "index": 7}, None]}


def test_verl_examples(tokenizer, caplog):
    asked = request(tokenizer, ["so #### 72", "so 72"], columns=VERL)
    with caplog.at_level(logging.WARNING):
        reward = build_reward(RewardConfig(fn=example("compute_score")))
        reward.check_columns(list(VERL))
    assert not caplog.records
    found = reward.score(asked)
    assert found.scores == [1.0, -1.0]
    assert found.logs[0] == {"extra": {"acc": True, "pred": "72"}, "logged": {"acc": 0.5}}
    # ground_truth may be a column of its own, and awaited functions run together
    plain = replace(asked, columns={"ground_truth": ["72", "so"], "data_source": ["x", "x"]})
    assert build_reward(RewardConfig(fn=example("awaited_score"))).score(plain).scores == [1.0, 0.0]
    with refused(RewardError, "needs an argument 'data_source'", "reward.kwargs.data_source=..."):
        build_reward(RewardConfig(fn=example("compute_score"))).check_columns(["ground_truth"])


def test_openrlhf_example(tokenizer):
    asked = request(tokenizer, [" 2", " 3"], columns={"answer": ["2", "2"]})
    reward = build_reward(RewardConfig(fn=example("reward_func")))
    reward.check_columns(["answer"])
    found = reward.score(asked)
    assert found.scores == [1.0, 0.0]
    assert found.logs[1]["logged"] == {"math_accuracy": 0.5, "per_sample": 0.5}

    def plain(queries, prompts, labels):
        assert queries == ["The film 2<eos>", "The film 3<eos>"]
        assert set(labels) == {""}
        return torch.tensor([1.0, 2.0])

    assert build_reward(RewardConfig(), reward_fn=plain).score(
        replace(asked, columns={})).scores == [1.0, 2.0]


def test_a_server_calls_them_alike(tokenizer):
    asked = request(tokenizer, ["so #### 72", "so 72"], columns=VERL, progress=(2, 5, 0.5))
    cfg = RewardConfig(fn=example("compute_score"))
    here = build_reward(cfg).score(asked)
    with serving_reward(build_reward(cfg), tokenizer=tokenizer) as address:
        there = build_reward(RewardConfig(fn="http", kwargs={
            "url": f"{address}/score"})).score(asked)
    assert (there.scores, there.dense) == (here.scores, here.dense)


def test_a_run_settles_styles_and_a_resume_keeps_them(world, command):
    (world / "prompts.jsonl").write_text("".join(
        json.dumps({"prompt": text, "ground_truth": "good", "data_source": "d"}) + "\n"
        for text in ("the film", "i saw", "this plot was", "it")))
    (world / "elsewhere.py").write_text(EXAMPLES.read_text())
    fns = {"dense": "dense_reward_fn", "log": "logging_reward", "verl": "my_reward_fn",
           "ours": "sentiment"}
    given = ["run_name=mixed", "~reward.fn", "ppo.num_steps=2", "ppo.num_rollouts=6",
             "tracking.log_rollouts=true", "eval.every_steps=1",
             *(f"reward.fns.{name}.fn=elsewhere.py:{fn}" for name, fn in fns.items())]
    told = [word for word in run_words(*given) if not word.startswith("reward.fn=")]
    done = command(*[word for word in told if word != "~reward.fn"], code=0)
    assert "is called as trlX does (reward.style)" in done.said
    folder = world / "runs/mixed"
    cfg = config_yaml.read_config(folder / "config.yaml")
    assert {name: entry.get("style") for name, entry in cfg.reward.fns.items()} == {
        "dense": "trlx", "log": "trl", "verl": "verl", "ours": None}
    assert cfg.reward.style == "ppocli"
    rows = jsonl(folder / "metrics.jsonl")
    assert all("logged/accuracy" in row and "eval/logged/accuracy" in row for row in rows[1:])
    samples = jsonl(folder / "samples.jsonl")
    assert all(row["extra"]["golden"] == "good" for row in samples)
    assert {row["extra"]["at"] for row in samples if row["kind"] == "rollout"} == {"0/2", "1/2"}
    # what a run has found for a function stays; what is found for another is its own
    again = command("resume=runs/mixed", "ppo.num_steps=3", "reward.fns.ours.fn=rewards.py:plain",
                    "reward.fns.log.fn=elsewhere.py:mixture", code=0)
    assert "changed on resume: reward.fns.dense" not in again.said
    after = config_yaml.read_config(folder / "config.yaml").reward.fns
    assert after["dense"]["style"] == "trlx"
    assert "style" not in after["log"]
    assert config_yaml.read_config(folder / "config.yaml").reward.style == "ppocli"
