"""Environments: what is asked of them, what they may answer, and what is refused."""

import operator
import random
from fractions import Fraction

import numpy as np
import played
import pytest
import torch
from helpers import refused
from played import stepped
from sessions import set_keys

from ppocli.config.schema import EnvConfig
from ppocli.data.data_set import PromptBatch
from ppocli.environments.env_calls import Called, Calls, as_step, reset_arguments
from ppocli.environments.registry import resolve
from ppocli.environments.shipped import LONGEST, Calculator, GuessNumber, evaluate
from ppocli.errors import RewardError
from ppocli.runs.episode import Step
from ppocli.sampling.samples import ROLLOUT


def calls_of(name: str, **keys) -> Calls:
    cfg = set_keys(EnvConfig(fn=f"played:{name}"), keys)
    return Calls(resolve(cfg, ["label"]), cfg, seed=7)


def begun(calls: Calls, *episodes: int):
    return [one.environment for one in calls.answers(
        [Called(None, episode, 0, {"prompt": "the", "messages": None, "label": 1})
         for episode in episodes], ROLLOUT)]


def test_random_numbers_are_those_of_seed_stream_episode_and_turn():
    calls = calls_of("Words")
    first, second = begun(calls, 0, 1), begun(calls, 0, 1)
    assert [one.last for one in first] == [one.last for one in second] == [
        int(np.random.default_rng([7, ROLLOUT, episode, 0]).integers(1, 5)) for episode in (0, 1)]
    said = [one.result.observation for one in stepped(calls, first, 1)]
    assert said == [(None, " good", " a film was", " warm")[
        int(np.random.default_rng([7, ROLLOUT, episode, 1]).integers(4))] for episode in (0, 1)]


@pytest.mark.parametrize("name", ["Keeps", "AsyncKeeps"])
def test_a_generator_that_reset_keeps_goes_on_with_the_episode_s_own_numbers(name):
    calls = calls_of(name)
    calls.group_size = 3
    games = begun(calls, 2, 3, 4, 5)  # any ranks' share of two groups
    assert [game.number for game in games] == [int(np.random.default_rng(
        [7, ROLLOUT, group, 0]).integers(10**6)) for group in (0, 1, 1, 1)]
    later = [one.result.reward for one in stepped(calls, games, 1)]
    assert len({*later, *(game.number for game in games)}) == 6
    again = [one.result.reward for one in stepped(calls, begun(calls, 2, 3, 4, 5), 1)]
    assert again == later


@pytest.mark.parametrize(("name", "keys"), [("Words", {"workers": 3}), ("Slow", {}),
                                            ("Words", {"timeout": 20.0})])
def test_calls_in_threads_and_awaited_ones_answer_the_same(name, keys):
    plain, other = calls_of("Words"), calls_of(name, **keys)
    wanted, got = begun(plain, *range(9)), begun(other, *range(9))
    for turn in (1, 2):
        assert [one.result for one in stepped(plain, wanted, turn)] == [
            one.result for one in stepped(other, got, turn)]


def test_what_is_known_of_a_prompt_is_no_column_of_that_name():
    """Such columns may hold the answer."""
    asked = [{"role": "user", "content": "hi"}]
    for chat in (False, True):
        batch = PromptBatch(tokens=torch.ones(1, 1, dtype=torch.long),
                            mask=torch.ones(1, 1, dtype=torch.bool), texts=["hi"],
                            messages=[asked] if chat else [], episodes=[0],
                            columns={"prompt": ["secret"], "messages": ["column"], "label": [3]})
        assert reset_arguments(batch, 0) == {"prompt": "hi", "messages": asked if chat else None,
                                             "label": 3}


@pytest.mark.parametrize(("name", "keys", "said"), [
    ("Failing", {}, "ValueError: the door is locked"),
    ("Failing", {"workers": 4}, "ValueError: the door is locked"),
    ("Hanging", {"timeout": 0.2}, "still running after 0.2 s (env.timeout)"),
    ("Garbage", {}, "'higher'\", not a Step or (observation, reward, done)"),
    ("NoNumber", {}, "the reward is nan, which is no finite number")])
def test_what_goes_wrong_names_episode_turn_file_and_line(name, keys, said):
    calls = calls_of(name, **keys)
    games = begun(calls, *range(6))
    stepped(calls, games, 1)
    with refused(RewardError, said) as caught:
        stepped(calls, games, 2, "an answer")
    first = next(i for i, one in enumerate(games) if one.fails)
    assert f"step, turn 2, of episode {first}" in str(caught.value)
    assert "'an answer'" in str(caught.value)
    if name == "Failing":
        assert "played.py:" in caught.value.where


def test_an_awaited_call_past_its_limit_is_one_episode_s_and_not_tried_again():
    played.Waiting.calls = 0
    calls = calls_of("Waiting", timeout=0.1, retries=3, on_error="truncate")
    found = stepped(calls, begun(calls, *range(3)), 1)
    assert played.Waiting.calls == 3
    assert all(f"step, turn 1, of episode {i}" in str(one.error) and
               "still running after 0.1 s (env.timeout)" in str(one.error)
               for i, one in enumerate(found))


def test_a_call_that_raised_is_tried_again():
    played.Counter.calls = 0
    calls = calls_of("Counter", retries=2)
    assert stepped(calls, begun(calls, 0), 1)[0].result == Step(None, 1.0, True)
    played.Counter.calls = 0
    with pytest.raises(RewardError, match="OSError: busy"):
        stepped(calls_of("Counter", retries=1), begun(calls, 0), 1)


@pytest.mark.parametrize(("given", "wanted"), [
    (Step("a", 1, True), Step("a", 1.0, True)), (("a", True, False), Step("a", 1.0, False)),
    (["", 0, 0], Step(None, 0.0, False)),
    (([{"role": "tool", "content": "x"}], torch.tensor(2.0), np.bool_(True)),
     Step([{"role": "tool", "content": "x"}], 2.0, True)),
    (Step("a", failed=ValueError("x\ny")), Step("a", failed="ValueError: x")),
    (Step(failed=False), Step())])
def test_what_a_step_may_be(given, wanted):
    assert as_step(given) == wanted


@pytest.mark.parametrize("given", [None, "text", ("a", "b", False), (3, 1.0, False),
                                   ("a", float("inf"), False), ([{"role": "tool"}], 0.0, False),
                                   ("a", 1.0, "False")])
def test_what_it_may_not_be(given):
    with pytest.raises((TypeError, ValueError)):
        as_step(given)


# Shipped ------------------------------------------------------------------------------------------

def game(seed: int, limit: int = 20) -> GuessNumber:
    environment = GuessNumber(limit)
    said = environment.reset(rng=np.random.default_rng(seed))
    assert said == f" from 1 to {limit}.\n"
    return environment


def binary_search(environment: GuessNumber) -> tuple[int, float]:
    """How many turns it takes, and what it earns."""
    low, high = 1, environment.limit
    for turn in range(1, 30):
        guess = (low + high) // 2
        step = environment.step(str(guess))
        if step.done:
            assert step.observation == " correct\n"
            return turn, step.reward
        assert step.reward == 0
        low, high = ((guess + 1, high) if step.observation == " higher\n" else (low, guess - 1))
    raise AssertionError("never found")


def test_binary_search_takes_as_long_as_it_does_in_theory():
    found = {game(seed).number: binary_search(game(seed)) for seed in range(300)}
    assert set(found) == set(range(1, 21))
    # a tree of 20 leaves: 1, 2, 4 and 8 numbers at depths 1 to 4, and the last 5 at depth 5
    assert sorted(turns for turns, _ in found.values()) == [
        1, *[2] * 2, *[3] * 4, *[4] * 8, *[5] * 5]
    assert all(reward == pytest.approx(1 - turns / 10) for turns, reward in found.values())


def answered(text: str, answer: str = "1776") -> Step:
    environment = Calculator()
    assert environment.reset(answer=answer) is None
    return environment.step(text)


def test_the_calculator_calculates():
    draw = random.Random(3)
    signs = {"+": operator.add, "-": operator.sub, "*": operator.mul, "/": operator.truediv}
    for _ in range(200):
        a, b, c = (draw.randint(1, 99) for _ in range(3))
        one, two = draw.choice("+-*/"), draw.choice("+-*/")
        wanted = signs[two](signs[one](Fraction(a), Fraction(b)), c)
        assert evaluate(f"(-{a} {one} -{b}){two}{c}") == pytest.approx(
            float(signs[two](signs[one](Fraction(-a), Fraction(-b)), c)))
        assert evaluate(f"({a}{one}{b}) {two} {c}") == pytest.approx(float(wanted))
    assert answered("calc 37*48") == Step(" = 1776\n")
    assert answered(" calc 7 / 2\n") == Step(" = 3.5\n")


@pytest.mark.parametrize("expression", [
    "", "1/0", "37*", "x", "2**9", "True+1", "1j", "'a'*3", "__import__('os')", "abs(1)", "[1][0]",
    "1 if 2 else 3", "(1,2)", "1;2", "9" * (LONGEST + 1), "(" * 99, "1_0\0", "7//2"])
def test_what_the_calculator_can_not_do_is_an_observation(expression):
    step = answered(f"calc {expression}")
    assert (step.observation, step.reward, step.done) == (" = error\n", 0.0, False)
    assert step.failed


def test_any_other_turn_is_the_answer():
    assert answered("1776") == answered("It is 1,776") == Step(reward=1.0, done=True)
    for text in ("1775", "", "37*48", "calc37*48", "17761"):
        assert answered(text) == Step(reward=0.0, done=True)
    assert answered("12", answer="5 + 7 = 12\n#### 12").reward == 1.0
    with pytest.raises(RewardError, match="no number"):
        answered("12", answer="twelve")
