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
from ppocli.errors import RewardError, StoppedError
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
        assert build_reward(cfg, reward_fn=flaky).score(request_of(3)).scores == [1.0] * 3
    assert calls == [3, 3, 3]
    assert sum("trying again" in record.getMessage() for record in caplog.records) == 2
    calls.clear()
    with pytest.raises(RewardError, match="2 times in a row, ConnectionError"):
        build_reward(RewardConfig(retries=1, timeout=timeout), reward_fn=flaky).score(request_of(3))
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


def test_without_timeout_the_call_stays_in_the_callers_thread():
    seen = []

    def where(outputs):
        seen.append(threading.current_thread())
        return [1.0] * len(outputs)

    build_reward(RewardConfig(), reward_fn=where).score(request_of(3))
    build_reward(RewardConfig(timeout=30), reward_fn=where).score(request_of(3))
    assert seen[0] is threading.main_thread()
    assert seen[1] is not threading.main_thread()
    assert seen[1].daemon


@pytest.mark.parametrize("timeout", [None, 30.0])
@pytest.mark.parametrize("stop", [KeyboardInterrupt(), StopRequested(15),
                                  StoppedError("stop", signal_number=15)])
def test_stop_requests_pass_through(stop, timeout):
    def interrupted(outputs):
        raise stop

    with pytest.raises(type(stop)) as caught:
        build_reward(RewardConfig(retries=2, timeout=timeout),
                     reward_fn=interrupted).score(request_of(3))
    assert caught.value is stop


class Leave(SystemExit):
    pass


OWN = {"exit 0": (SystemExit(0), "raised SystemExit: 0"),
       "exit 3": (SystemExit(3), "raised SystemExit: 3"),
       "subclass": (Leave("bye"), "raised Leave: bye"),
       "cancelled": (asyncio.CancelledError(), "raised CancelledError"),
       "long": (ValueError("x" * 5_000_000), "raised ValueError: xxx")}


@pytest.mark.parametrize("timeout", [None, 30.0])
@pytest.mark.parametrize("case", OWN)
def test_what_a_function_raises_is_its_error_whatever_it_is(case, timeout):
    raised, said = OWN[case]

    def score(outputs):
        raise raised

    for judge, ask in ((build_reward, "score"), (build_metric, "compute")):
        built = judge(RewardConfig(timeout=timeout), **{
            "reward_fn" if judge is build_reward else "metric_fn": score})
        with refused(RewardError, "score", said, "test_rewards_calls.py:",
                     "the first is 'prompt0 response0'") as caught:
            getattr(built, ask)(request_of(3))
        assert len(str(caught.value)) < 10_000

    class Built:
        def __init__(self) -> None:
            raise raised

        def __call__(self, outputs):
            """Never reached."""

    with refused(RewardError, "Building", "failed: ") as caught:
        build_reward(RewardConfig(), reward_fn=Built)
    assert len(str(caught.value)) < 10_000


KEPT = []
"""a mode ends with the object that entered it"""


def _enter_inference() -> None:
    KEPT.append(torch.inference_mode())
    KEPT[-1].__enter__()


MODES = {"default dtype": lambda: torch.set_default_dtype(torch.float64),
         "inference mode": _enter_inference, "grad mode": lambda: torch.set_grad_enabled(False),
         "default device": lambda: torch.set_default_device("meta")}


@pytest.mark.parametrize("mode", MODES)
def test_a_mode_of_torch_that_is_left_changed_is_an_error(mode):
    def score(outputs):
        MODES[mode]()
        return [1.0] * len(outputs)

    with torch.inference_mode(False), torch.set_grad_enabled(True):  # which end what is left
        try:
            with refused(RewardError, "score", f"torch's {mode}", "'prompt0 response0'"):
                build_reward(RewardConfig(), reward_fn=score).score(request_of(3))
        finally:
            torch.set_default_dtype(torch.float32)
            torch.set_default_device(None)


def test_a_mode_of_torch_may_be_changed_within_a_call():
    def careful(outputs):
        with torch.inference_mode():
            return torch.ones(len(outputs))

    with torch.no_grad():
        assert build_reward(RewardConfig(), reward_fn=careful).score(request_of(3)).scores
        assert not torch.is_grad_enabled()


def test_a_call_that_blocks_holds_up_no_later_one():
    blocked = []

    async def once(outputs):
        if not blocked:
            blocked.append(True)
            time.sleep(1.5)
        return [1.0] * len(outputs)

    reward = build_reward(RewardConfig(timeout=0.3), reward_fn=once)
    with pytest.raises(RewardError, match="still running after"):
        reward.score(request_of(2))
    assert reward.score(request_of(2)).scores == [1.0, 1.0]


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
        assert build_reward(cfg, reward_fn=fn).score(request_of(3)).scores == [9.0] * 3

    turns = asyncio.Semaphore(1)  # belongs to the event loop of the first call

    async def in_turn(outputs):
        async def one(output):
            async with turns:
                await asyncio.sleep(0)
                return 1.0
        return await asyncio.gather(*map(one, outputs))

    reward = build_reward(cfg, reward_fn=in_turn)
    assert [reward.score(request_of(3)).scores for _ in range(2)] == [[1.0] * 3] * 2

    another = build_reward(RewardConfig(), reward_fn=gathered)

    async def asks_another(outputs):
        return another.score(request_of(len(outputs))).scores

    assert build_reward(cfg, reward_fn=asks_another).score(request_of(3)).scores == [9.0] * 3

    async def leaves(outputs):
        raise SystemExit(3)

    with pytest.raises(RewardError, match="raised SystemExit"):
        build_reward(cfg, reward_fn=leaves).score(request_of(3))

    async def notebook():
        return build_reward(cfg, reward_fn=gathered).score(request_of(3)).scores

    assert asyncio.run(notebook()) == [9.0] * 3
