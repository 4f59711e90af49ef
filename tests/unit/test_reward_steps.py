"""Scores of the steps of a response: where steps end, on which tokens scores land, what is refused.
All by hand."""

from dataclasses import replace

import pytest
from data_tokenizers import utf8_bytes
from helpers import refused
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from ppocli.config.schema import RewardConfig
from ppocli.errors import RewardError
from ppocli.ppo.policy_samples import in_steps
from ppocli.rewards.reward_records import RewardRequest, ends_of_steps, step_texts
from ppocli.rewards.scoring import build_reward
from ppocli.sampling.samples import SamplingSpec, decode_responses, places_of_ends

SEPARATED = [
    ("a\nb\n", "\n", ["a\n", "b\n"]), ("", "\n", []),
    # what is empty between two separators, at the end or the beginning is part of a step
    ("\n\na\n\n \nb\n ", "\n", ["\n\na\n\n \n", "b\n "]),
    ("Step 1. é. 世界. x", ". ", ["Step 1. ", "é. ", "世界. ", "x"]),
    ("a\n\nb\nc", "\n\n", ["a\n\n", "b\nc"])]


@pytest.mark.parametrize(("text", "separator", "wanted"), SEPARATED)
def test_a_step_ends_behind_a_separator_or_with_the_text(text, separator, wanted):
    ends = ends_of_steps(text, separator)
    assert step_texts(text, ends) == wanted


def pieces(*tokens: str, metaspace: bool = False) -> PreTrainedTokenizerFast:
    """One token a piece of text, whatever is in it; SentencePiece's mark of a word in front."""
    vocabulary = {token: i for i, token in enumerate((*tokens, "<eos>"))}
    inner = Tokenizer(models.WordLevel(vocabulary, unk_token="<eos>"))
    inner.decoder = decoders.Metaspace() if metaspace else decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="<eos>", unk_token="<eos>")


SPANNING = pieces("x", " = 1", "\ny", "\n\n", "z")
"""token 2 ends one step and begins the next"""
MARKED = pieces("▁the", "▁cat", ".", "▁it", metaspace=True)
BYTES = utf8_bytes()


def bytes_of(text: str) -> list[int]:
    return BYTES(text)["input_ids"]


PLACES = [
    # "x = 1\n" ends within token 2, "y\n\n" with 3, "z" with 4; <eos> (5) is part of no step
    (SPANNING, [], [0, 1, 2, 3, 4, 5], ["x = 1\n", "y\n\n", "z"], [2, 3, 4]),
    (SPANNING, [0], [2, 2, 3], ["\ny\n", "y\n\n"], [1, 2]),
    # decoded alone, the response would lose the space that it begins with
    (MARKED, [0], [1, 2, 3, 2], [" cat.", " it."], [1, 3]),
    # é has two bytes, 世 three: a step is complete with the last of them
    (BYTES, bytes_of("q"), bytes_of("é\n世"), ["é", "\n世"], [1, 5]),
    (BYTES, [], [256], [], [])]


@pytest.mark.parametrize(("tokenizer", "before", "ids", "parts", "wanted"), PLACES)
def test_a_step_ends_with_the_token_that_completes_it(tokenizer, before, ids, parts, wanted):
    text, = decode_responses(tokenizer, [before], [ids], SamplingSpec(9, ()))
    assert text == "".join(parts)
    ends = [len("".join(parts[:n + 1])) for n in range(len(parts))]
    assert places_of_ends(tokenizer, [before], [ids], [ends]) == [wanted]


def request() -> RewardRequest:
    """Two responses of three steps and of none."""
    return RewardRequest(["q", "q"], ["x = 1\ny\n\nz", ""], [[0, 1, 2, 3, 4, 5], [5]], {}, SPANNING,
                         prompt_ids=[[], []])


LINES = RewardConfig(step_separator="\n")


def scored(fn, cfg: RewardConfig = LINES):
    reward = build_reward(cfg, reward_fn=fn)
    reward.check_columns([])
    return reward.score(in_steps(reward, request()))


def test_scores_land_on_the_tokens_that_end_steps():
    seen = []

    def score(responses, steps):
        seen.extend(steps)
        return [[0.5, -1, 2.25], []]

    found = scored(score)
    assert seen == [["x = 1\n", "y\n\n", "z"], []]
    assert found.dense == [[0, 0, 0.5, -1, 2.25, 0], [0]]
    assert found.scores == [1.75, 0.0]
    # a function that doesn't ask for steps scores tokens as ever
    assert scored(lambda response_ids: [[1.0] * len(ids) for ids in response_ids]).dense == [
        [1.0] * 6, [1.0]]
    # two steps that end in one token add up
    both = replace(request(), steps=[["a", "b"], []], step_ends=[[2, 2], []])
    assert build_reward(LINES, reward_fn=lambda steps: [[1.0, 2.0], []]).score(both).dense == [
        [0, 0, 3.0, 0, 0, 0], [0]]


def test_rewards_of_steps_samples_and_tokens_are_summed_on_tokens(tmp_path, monkeypatch):
    (tmp_path / "mine.py").write_text(
        "def each(steps):\n    return [[1.0] * len(one) for one in steps]\n\n\n"
        "def whole(responses):\n    return [3.0 if text else None for text in responses]\n\n\n"
        "def tokens(response_ids):\n    return [[0.5] * len(ids) for ids in response_ids]\n")
    monkeypatch.chdir(tmp_path)
    weights = {"each": 2.0, "whole": 10.0, "tokens": 1.0}
    found = scored(None, replace(LINES, fns={
        name: {"fn": f"mine.py:{name}", "weight": weight} for name, weight in weights.items()}))
    assert found.dense == [[0.5, 0.5, 2.5, 2.5, 2.5, 30.5], [0.5]]
    assert found.scores == [39.0, 0.5]
    assert found.parts == {"each": [3.0, 0.0], "whole": [3.0, None], "tokens": [3.0, 0.5]}


def test_a_function_says_what_steps_are(tmp_path, monkeypatch):
    (tmp_path / "cut.py").write_text(
        "def texts(responses):\n    return [[x[:3], x[3:7]] if x else [] for x in responses]\n\n\n"
        "def ends(responses):\n    return [[3, 7], []]\n\n\n"
        "def other(responses):\n    return [['x', '= 1'], []]\n\n\n"
        "def raises(responses):\n    raise ValueError('no steps today')\n")
    monkeypatch.chdir(tmp_path)
    # "x =" is within token 1, " 1\ny" ends token 2; what follows is no step
    assert scored(lambda steps: [[1.0] * len(own) for own in steps],
                  RewardConfig(step_fn="cut.py:texts")).dense == [[0, 1, 1, 0, 0, 0], [0]]
    for name, told in (("ends", "list [3, 7] for sample 0: 'qx = 1"),
                       ("other", "list ['x', '= 1'] for sample 0"), ("raises", "no steps today")):
        with refused(RewardError, told, f"cut.py:{name}"):
            scored(lambda steps: [], RewardConfig(step_fn=f"cut.py:{name}"))


def test_words_add_to_a_balance_on_the_tokens_that_end_them():
    says = pieces("A", " good", ", ", "bad", " goo", "d", "!")
    texts = ["A good, bad good!", "!", "bad"]
    ids = [[0, 1, 2, 3, 4, 5, 6, 7], [6, 7], [3]]
    asked = RewardRequest(["q"] * 3, texts, ids, {}, says, prompt_ids=[[]] * 3)
    kwargs = {"positive": ["good"], "negative": ["bad"]}
    reward = build_reward(RewardConfig(fn="step_word_list", kwargs=kwargs, step_fn="words"))
    reward.check_columns([])
    found = reward.score(in_steps(reward, asked))
    # the balance is 1 after the first word of the lists, 0 after the second, 1/3 after the third
    assert found.dense == [pytest.approx([0, 1, 0, -1, 0, 1 / 3, 0, 0]), [0, 0], [-1]]
    whole = build_reward(RewardConfig(fn="word_list", kwargs=kwargs)).score(asked).scores
    assert found.scores == pytest.approx(whole) == [1 / 3, 0.0, -1.0]


def test_steps_are_refused_where_nothing_says_what_they_are():
    def score(responses, steps):
        return [len(one) for one in steps]

    with refused(RewardError, "takes the steps of responses, and nothing defines them",
                 "reward.step_separator or reward.step_fn"):
        build_reward(RewardConfig(), reward_fn=score).check_columns([])
    build_reward(LINES, reward_fn=score).check_columns([])
