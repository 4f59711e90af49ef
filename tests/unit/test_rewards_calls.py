"""How functions of a reward are called: what they raise, how long they take, what they leave."""

import asyncio
import logging
import threading
import time

import pytest
import torch
from helpers import refused, request_of

from ppocli.config.schema import RewardConfig
from ppocli.distributed.ranks import StopRequested
from ppocli.errors import RewardError
from ppocli.rewards.scoring import build_metric, build_reward


def test_an_exception_names_the_line_and_the_batch():
    def failing(outputs):
        return [int(output) for output in outputs]

    def lazy(outputs):
        yield int(outputs[0])

    for fn in (failing, lazy):
        line = fn.__code__.co_firstlineno + 1
        with refused(RewardError, "ValueError: invalid literal", "3 samples", fn.__name__,
                     f"test_rewards_calls.py:{line}", "'prompt0 response0'") as caught:
            build_reward(RewardConfig(), reward_fn=fn).score(request_of(3))
        assert isinstance(caught.value.__cause__, ValueError)


def test_retries(caplog):
    calls = []

    def flaky(outputs):
        assert threading.current_thread() is threading.main_thread()  # there is no time limit
        calls.append(len(outputs))
        outputs.clear()
        if len(calls) < 3:
            raise ConnectionError("service is away")
        return [1.0] * 3

    with caplog.at_level(logging.WARNING):
        cfg = RewardConfig(retries=2)
        assert build_reward(cfg, reward_fn=flaky).score(request_of(3)).scores == [1.0] * 3
    assert calls == [3, 3, 3]
    assert sum("trying again" in record.getMessage() for record in caplog.records) == 2
    calls.clear()
    with pytest.raises(RewardError, match="2 times in a row, ConnectionError"):
        build_reward(RewardConfig(retries=1), reward_fn=flaky).score(request_of(3))
    assert len(calls) == 2
    # a bad return is not retried
    with pytest.raises(RewardError, match="1 value for 3"):
        build_reward(cfg, reward_fn=lambda outputs: [calls.append(1) or 1.0]).score(request_of(3))
    assert len(calls) == 3


def test_timeout():
    release = threading.Event()

    def stuck(outputs):
        release.wait(20)
        return [1.0] * len(outputs)

    started = time.monotonic()
    with refused(RewardError, "reward.timeout=0.2", "still running after 0.", "stuck"):
        build_reward(RewardConfig(timeout=0.2, retries=3), reward_fn=stuck).score(request_of(3))
    assert time.monotonic() - started < 5
    release.set()


@pytest.mark.parametrize(("stop", "timeout"), [(KeyboardInterrupt(), None),
                                               (StopRequested(15), 30.0)])
def test_stop_requests_pass_through(stop, timeout):
    def interrupted(outputs):
        raise stop

    with pytest.raises(type(stop)) as caught:
        build_reward(RewardConfig(retries=2, timeout=timeout),
                     reward_fn=interrupted).score(request_of(3))
    assert caught.value is stop


@pytest.mark.parametrize(("raised", "said"), [
    (SystemExit(3), "raised SystemExit: 3"),
    (asyncio.CancelledError(), "raised CancelledError"),
    (ValueError("x" * 5_000_000), "raised ValueError: xxx")])
def test_what_a_function_raises_is_its_error_whatever_it_is(raised, said):
    def score(outputs):
        raise raised

    for ask in (build_reward(RewardConfig(timeout=30.0), reward_fn=score).score,
                build_metric(RewardConfig(), metric_fn=score).compute):
        with refused(RewardError, "score", said, "test_rewards_calls.py:",
                     "the first is 'prompt0 response0'") as caught:
            ask(request_of(3))
        assert len(str(caught.value)) < 10_000


MODES = {"default dtype": lambda: torch.set_default_dtype(torch.float64),
         "grad mode": lambda: torch.set_grad_enabled(False)}


@pytest.mark.parametrize("mode", MODES)
def test_a_mode_of_torch_that_is_left_changed_is_an_error(mode):
    def score(outputs):
        MODES[mode]()
        return [1.0] * len(outputs)

    with torch.set_grad_enabled(True):  # which ends what is left
        try:
            with refused(RewardError, "score", f"torch's {mode}", "'prompt0 response0'"):
                build_reward(RewardConfig(), reward_fn=score).score(request_of(3))
        finally:
            torch.set_default_dtype(torch.float32)


def test_async_functions_and_objects():
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

    cfg = RewardConfig(timeout=30.0)
    for fn in (Judge, not_async_itself):
        assert build_reward(cfg, reward_fn=fn).score(request_of(3)).scores == [9.0] * 3

    async def notebook():
        return build_reward(cfg, reward_fn=gathered).score(request_of(3)).scores

    assert asyncio.run(notebook()) == [9.0] * 3
