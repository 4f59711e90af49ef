"""``ppocli serve-reward``: what it answers, what it refuses, whom it lets in."""

import json
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import pytest
from helpers import request_of, serving_reward

from ppocli.config.schema import RewardConfig
from ppocli.rewards import serving as serving_module
from ppocli.rewards.reward_records import RewardScores
from ppocli.rewards.scoring import build_reward


@contextmanager
def serving(fn: Any, **settings: Any) -> Iterator[str]:
    reward = build_reward(RewardConfig(on_invalid="skip"), reward_fn=fn)
    with serving_reward(reward, **{"max_body": 10_000, **settings}) as address:
        yield address


def asked(url: str, count: int = 5, concurrency: int = 1, **settings: Any) -> RewardScores:
    """What a run is given by ``url`` for so many samples."""
    cfg = RewardConfig(fn="http", kwargs={"url": url, "concurrency": concurrency}, **settings)
    samples = replace(request_of(count), columns={"wanted": [*range(count)]},
                      response_ids=[[i, 7] for i in range(count)])
    return build_reward(cfg).score(samples)


def test_a_served_reward_scores_the_steps_that_it_is_told():
    """It needs neither a tokenizer nor to know what a step is; without steps it refuses."""
    samples = replace(request_of(2, 3), steps=[["res", "ponse0"], ["response1"]],
                      step_ends=[[0, 2], [1]])

    def score(prompts, steps):
        return [[float(len(step)) for step in own] for own in steps]

    with serving(score) as url:
        found = build_reward(RewardConfig(fn="http", kwargs={"url": f"{url}/score"})).score(samples)
        assert found.dense == [[3.0, 0.0, 6.0], [0.0, 9.0, 0.0]]


def post(url: str, body: bytes, **headers: str) -> tuple[int, dict[str, Any]]:
    try:
        with urlopen(Request(url, body, headers), timeout=20) as answer:
            return answer.status, json.load(answer)
    except HTTPError as error:
        with error:
            text = error.read().decode()
            return error.code, json.loads(text) if text.startswith("{") else {"error": text}


def test_scores_a_token_and_missing_ones_arrive():
    def dense(response_ids):
        return [[0.5] * len(ids) if ids[0] else None for ids in response_ids]

    with serving(dense) as address:
        found = asked(f"{address}/score", 3, on_invalid="skip")
    assert found.valid == [False, True, True]
    assert found.dense == [[0.0, 0.0], [0.5, 0.5], [0.5, 0.5]]


SAMPLE = {"prompts": ["p"], "responses": ["r"], "response_ids": [[1]]}
WRONG = {
    "no json": (b"{", 400, "no JSON: '{'"),
    "count": (json.dumps({**SAMPLE, "prompts": ["a", "b"]}).encode(), 400,
              "'prompts' has 2 values in place of 1"),
    "lacks": (json.dumps(SAMPLE).encode(), 422, "needs an argument 'wanted'"),
    "raises": (json.dumps({**SAMPLE, "columns": {"wanted": [0]}}).encode(), 500,
               "raised ZeroDivisionError"),
    "large": (b" " * 10_001, 413, "10001 bytes are more than the 10000"),
}


def divide(wanted):
    return [1 / x for x in wanted]


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_request_is_told_so_and_the_next_is_served(case):
    body, status, said = WRONG[case]
    with serving(divide) as address:
        code, answer = post(f"{address}/score", body)
        assert code == status
        assert said in answer["error"]
        right = json.dumps({**SAMPLE, "columns": {"wanted": [4]}, "progress": [1, 10, 0.5]}
                           ).encode()
        assert post(f"{address}/score", right) == (200, {"scores": [0.25]})
        assert post(f"{address}/other", right)[0] == 404
        with urlopen(f"{address}/health", timeout=20) as health:
            said_so = json.load(health)
        assert (said_so["status"], said_so["requests"], said_so["samples"]) == ("ok", 1, 1)


def test_the_token_is_asked_for():
    body = json.dumps({**SAMPLE, "columns": {"wanted": [1]}}).encode()
    with serving(divide, token="abc") as address:
        assert post(f"{address}/score", body)[0] == 401
        assert post(f"{address}/score", body, Authorization="Bearer ab")[0] == 401
        assert post(f"{address}/score", body, Authorization="Bearer abc")[0] == 200


def opened(address: str, said: bytes) -> socket.socket:
    """A connection on which so much of a request has been sent."""
    host, _, port = address.removeprefix("http://").rpartition(":")
    connection = socket.create_connection((host, int(port)), timeout=20)
    connection.sendall(said)
    return connection


def ones(responses):
    return [1.0] * len(responses)


def test_requests_beyond_those_that_may_wait_are_refused(monkeypatch):
    monkeypatch.setattr(serving_module, "MOST_WAITING", 1)
    head = b"POST /score HTTP/1.1\r\nHost: h\r\nContent-Length: 10000\r\n\r\n{"
    with serving(ones) as address:
        with opened(address, head):
            deadline = time.monotonic() + 20
            while post(f"{address}/score", json.dumps(SAMPLE).encode())[0] != 503:
                assert time.monotonic() < deadline  # the other one may come later
        while post(f"{address}/score", json.dumps(SAMPLE).encode())[0] != 200:
            assert time.monotonic() < deadline


@pytest.mark.parametrize("thread_safe", [False, True])
def test_requests_are_let_in_one_by_one_unless_the_reward_is_thread_safe(thread_safe):
    inside, counts, gate = [], [], threading.Barrier(2, timeout=20)

    def crowd(responses):
        inside.append(None)
        counts.append(len(inside))
        if thread_safe:
            gate.wait()  # until two are here
        else:
            time.sleep(0.05)
        inside.pop()
        return [1.0] * len(responses)

    crowd.thread_safe = thread_safe
    with serving(crowd) as address:
        asked(f"{address}/score", 8, concurrency=4)
    assert (max(counts) > 1) == thread_safe
