"""What a call of a reward function may do: raise, take its time, be asynchronous, be stopped."""

import asyncio
import logging
import threading
import time

import pytest
from helpers import request_of

from ppocli.config.schema import RewardConfig
from ppocli.errors import RewardError, StoppedError
from ppocli.rewards.scoring import build_metric, build_reward

N = 3


def test_no_samples_no_call():
    def never(outputs):
        raise AssertionError

    assert build_reward(RewardConfig(), reward_fn=never).score(request_of(0)).scores == []
    metric = build_metric(RewardConfig(), never)
    assert metric is not None
    assert metric.compute(request_of(0)) == {}


def test_an_exception_names_the_line_and_the_batch():
    def failing(outputs):
        return [int(output) for output in outputs]

    with pytest.raises(RewardError) as caught:
        build_reward(RewardConfig(), reward_fn=failing).score(request_of(N))
    message = str(caught.value)
    line = failing.__code__.co_firstlineno + 1
    for words in ("ValueError: invalid literal", f"test_rewards_calls.py:{line}", "3 samples",
                  "'prompt0 response0'", "failing"):
        assert words in message
    assert isinstance(caught.value.__cause__, ValueError)


def test_an_exception_inside_a_generator_is_the_functions_own():
    def lazy(outputs):
        for _ in outputs:
            raise KeyError("score")
        yield 1.0

    with pytest.raises(RewardError, match="KeyError: 'score'"):
        build_reward(RewardConfig(), reward_fn=lazy).score(request_of(N))


@pytest.mark.parametrize("timeout", [None, 30.0])
def test_retries(caplog, timeout):
    calls = []

    def flaky(outputs):
        calls.append(len(outputs))
        outputs.clear()
        if len(calls) < 3:
            raise ConnectionError("service is away")
        return [1.0] * 3

    with caplog.at_level(logging.WARNING):
        cfg = RewardConfig(retries=2, timeout=timeout)
        assert build_reward(cfg, reward_fn=flaky).score(request_of(N)).scores == [1.0] * 3
    assert calls == [3, 3, 3]
    assert sum("trying again" in record.getMessage() for record in caplog.records) == 2
    calls.clear()
    with pytest.raises(RewardError, match="2 times in a row, ConnectionError"):
        build_reward(RewardConfig(retries=1, timeout=timeout), reward_fn=flaky).score(request_of(N))
    assert len(calls) == 2


def test_a_bad_return_is_not_retried():
    calls = []

    def short(outputs):
        calls.append(1)
        return [1.0]

    with pytest.raises(RewardError, match="1 value for 3"):
        build_reward(RewardConfig(retries=5), reward_fn=short).score(request_of(N))
    assert len(calls) == 1


def test_timeout():
    release = threading.Event()

    def stuck(outputs):
        release.wait(20)
        return [1.0] * len(outputs)

    started = time.monotonic()
    with pytest.raises(RewardError) as caught:
        build_reward(RewardConfig(timeout=0.2, retries=3), reward_fn=stuck).score(request_of(N))
    assert time.monotonic() - started < 5
    release.set()
    for words in ("reward.timeout=0.2", "still running after 0.", "stuck"):
        assert words in str(caught.value)


def test_without_timeout_the_call_stays_in_the_callers_thread():
    seen = []

    def where(outputs):
        seen.append(threading.current_thread())
        return [1.0] * len(outputs)

    build_reward(RewardConfig(), reward_fn=where).score(request_of(N))
    build_reward(RewardConfig(timeout=30), reward_fn=where).score(request_of(N))
    assert seen[0] is threading.main_thread()
    assert seen[1] is not threading.main_thread()
    assert seen[1].daemon


@pytest.mark.parametrize("timeout", [None, 30.0])
@pytest.mark.parametrize("stop", [KeyboardInterrupt(), StoppedError("stop", signal_number=15),
                                  SystemExit(143)])
def test_stop_requests_pass_through(stop, timeout):
    def interrupted(outputs):
        raise stop

    with pytest.raises(type(stop)) as caught:
        build_reward(RewardConfig(retries=2, timeout=timeout),
                     reward_fn=interrupted).score(request_of(N))
    assert caught.value is stop


@pytest.mark.parametrize("timeout", [None, 30.0])
def test_async_functions_and_objects(timeout):
    async def one(output):
        await asyncio.sleep(0)
        return float(len(output))

    async def gathered(outputs, **kwargs):
        return await asyncio.gather(*(one(output) for output in outputs))

    class Judge:
        async def __call__(self, outputs):
            return await gathered(outputs)

    def not_async_itself(outputs):
        return gathered(outputs, extra=1)

    cfg = RewardConfig(timeout=timeout)
    for fn in (gathered, Judge, Judge(), not_async_itself):
        assert build_reward(cfg, reward_fn=fn).score(request_of(N)).scores == [9.0] * 3


def test_async_inside_a_running_loop():
    async def judge(outputs):
        return [1.0] * len(outputs)

    async def notebook():
        return build_reward(RewardConfig(), reward_fn=judge).score(request_of(N)).scores

    assert asyncio.run(notebook()) == [1.0] * 3
