"""What reward functions and metrics may return, and what becomes of it."""

import math

import numpy as np
import pytest
import torch
from helpers import refused, request_of

from ppocli.config.schema import RewardConfig
from ppocli.errors import RewardError
from ppocli.rewards.reward_records import RewardRequest, RewardScores
from ppocli.rewards.scoring import build_metric, build_reward, check_invalid_share

N = 3


def scores_of(value: object, cfg: RewardConfig | None = None, count: int = N,
              tokens: int = 2) -> RewardScores:
    def user_reward(outputs):
        return value() if callable(value) else value

    return build_reward(cfg or RewardConfig(), reward_fn=user_reward).score(
        request_of(count, tokens))


class Broken:
    def tolist(self) -> object:
        raise SystemExit(0)


BAD_RETURNS = {
    "nothing": (None, "returned None for 3 samples"),
    "scalar": (1.0, "returned 1.0 for 3 samples"),
    "generator": (lambda: (1.0 for _ in range(9)), "returned 9 values for 3 samples"),
    "text": ([1.0, "0.5", 1.0], "returned str '0.5' for sample 1: 'prompt1 response1'"),
    "inf": ([1.0, math.inf, 1.0], "returned inf, which is infinite in float32, for sample 1"),
    "over float32": ([1.0, 1.0, 1e300], "1e+300, which is infinite in float32, for sample 2"),
    "broken object": (Broken(), "raised SystemExit: 0"),
    "complex tensor": (torch.ones(N, dtype=torch.complex64), "returned complex"),
    "column": ([[1.0]] * N, "a list of 1 number, but the response has 2 tokens, for sample 0"),
    "tensor": (torch.ones(N, 4, requires_grad=True), "a list of 4 numbers, but the response has"),
    "dense too long": ([[1.0, 2.0], [1.0, 2.0, 3.0], [1.0, 2.0]],
                       "a list of 3 numbers, but the response has 2 tokens, for sample 1"),
    "mixed": ([1.0, [1.0, 2.0], 1.0], "list [1.0, 2.0], but numbers for those before it, for"),
    "None": ([1.0, None, 1.0], "returned None for sample 1"),
    "NaN inside": ([[1.0, math.nan]] * 3, "None or NaN in it for sample 0"),
}


@pytest.mark.parametrize("case", BAD_RETURNS)
def test_bad_returns_are_refused_with_the_function_and_the_sample(case):
    value, words = BAD_RETURNS[case]
    with refused(RewardError, words, "user_reward", "test_rewards_scoring.py:", "fix:") as caught:
        scores_of(value)
    assert caught.value.exit_code == 7


@pytest.mark.parametrize("value", [
    [True, np.bool_(False), 2], (1, 0, 2), np.array([1, 0.0, np.int8(2)], dtype=object),
    [torch.tensor(1.0), torch.tensor(0), np.array(2.0)],
    torch.tensor([1.0, 0.0, 2.0], dtype=torch.bfloat16, requires_grad=True),
    lambda: (x for x in (1, 0, 2))])
def test_good_returns_are_converted(value):
    result = scores_of(value)
    assert result.scores == [1.0, 0.0, 2.0]
    assert all(type(score) is float for score in result.scores)
    assert result.dense is None
    assert result.valid == [True] * 3


def test_skip_drops_none_and_nan():
    result = scores_of([1.0, None, math.nan], RewardConfig(on_invalid="skip"))
    assert result.scores == [1.0, 0.0, 0.0]
    assert result.valid == [True, False, False]
    assert result.parts == {"user_reward": [1.0, None, None]}
    dense = scores_of([[1.0, 2.0], [None, 1.0], None], RewardConfig(on_invalid="skip"))
    assert dense.dense == [[1.0, 2.0], [0.0, 0.0], [0.0, 0.0]]
    assert dense.valid == [True, False, False]


def test_too_many_invalid_samples_stop_the_run():
    check_invalid_share(0, 1)
    check_invalid_share(10, 100)
    with pytest.raises(RewardError, match="11 of the 100 samples"):
        check_invalid_share(11, 100)
    check_invalid_share(1, 8)  # of a last step
    with pytest.raises(RewardError, match="1 of the 1 samples"):
        check_invalid_share(1, 1)
    with pytest.raises(RewardError, match="An environment failed: KeyError: 'x'") as caught:
        check_invalid_share(2, 8, ["KeyError: 'x'"])
    assert caught.value.where == "env.on_error=drop"


WEIGHTED = '''
def style(outputs): return [1.0, None, 2.0]
def dense(outputs): return [[1.0, 2.0], [3.0, 4.0], None]
def none(outputs): return [None, None, None]
def nan(outputs): return [float("nan"), 1.0, 1.0]
def huge(outputs): return [3e38, 3e38, 3e38]
'''


@pytest.fixture
def weighted(tmp_path):
    path = tmp_path / "weighted.py"
    path.write_text(WEIGHTED)

    def build(on_invalid="error", **weights):
        return build_reward(RewardConfig(on_invalid=on_invalid, fns={
            name: {"fn": f"{path}:{name}", "weight": weight} for name, weight in weights.items()}))

    return build


def test_several_rewards_are_weighted_and_none_does_not_apply(weighted):
    result = weighted(style=2.0, dense=0.5).score(request_of(N))
    assert result.scores == [2.0 * 1 + 0.5 * 3, 0.5 * 7, 2.0 * 2]
    assert result.dense == [[0.5, 1.0 + 2.0], [1.5, 2.0], [0.0, 4.0]]
    assert result.parts == {"style": [1.0, None, 2.0], "dense": [3.0, 7.0, None]}
    assert result.valid == [True] * 3


def test_none_from_all_and_nan_from_one_are_invalid(weighted):
    with pytest.raises(RewardError, match="returned None for sample 1"):
        weighted(style=1.0, none=1.0).score(request_of(N))
    with pytest.raises(RewardError, match=r"nan \(.*returned NaN for sample 0"):
        weighted(style=1.0, nan=1.0).score(request_of(N))
    result = weighted("skip", style=1.0, none=1.0).score(request_of(N))
    assert result.valid == [True, False, True]
    assert result.scores == [1.0, 0.0, 2.0]
    assert weighted("skip", style=1.0, nan=1.0).score(request_of(N)).valid == [False, True, True]


def test_a_sum_may_not_overflow_and_needs_a_token_to_land_on(weighted):
    with pytest.raises(RewardError, match="infinite in float32"):
        weighted(huge=2.0).score(request_of(N))
    request = RewardRequest(["p"] * 3, ["r"] * 3, [[1, 2], [1, 2], []], {}, None)
    with pytest.raises(RewardError, match="Sample 2 has no response token"):
        weighted(style=1.0, dense=1.0).score(request)


def metric_of(value: object) -> dict[str, list[float]]:
    def user_metric(outputs):
        return value

    metric = build_metric(RewardConfig(), user_metric)
    return metric.compute(request_of(N))


def test_metrics_are_converted():
    value = {"a": [1, True, 2], "b": torch.tensor([1.0, 2.0, 3.0]), "c": range(3)}
    assert metric_of(value) == {"a": [1.0, 1.0, 2.0], "b": [1.0, 2.0, 3.0], "c": [0.0, 1.0, 2.0]}
