"""The reward that asks a server, against servers that misbehave."""

import json
import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from helpers import refused, running

from ppocli.config.schema import RewardConfig
from ppocli.config.secrets import safe_text
from ppocli.errors import RewardError
from ppocli.rewards import remote
from ppocli.rewards.reward_records import RewardRequest
from ppocli.rewards.scoring import build_reward

Answer = Callable[[dict[str, Any], int], tuple[int, str]]


@contextmanager
def answering(answer: Answer) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """A server that is not ours; its address, and what it was posted with headers and all."""
    asked: list[dict[str, Any]] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_error(405)

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            asked.append({"body": body, "headers": dict(self.headers)})
            status, text = answer(body, len(asked))
            self.send_response(status)
            self.end_headers()
            self.wfile.write(text.encode())

        def log_message(self, format: str, *args: Any) -> None:
            pass

    with running(ThreadingHTTPServer(("127.0.0.1", 0), Handler)) as url:
        yield f"{url}/score", asked


def request_of(count: int = 5) -> RewardRequest:
    return RewardRequest([f"p{i} " for i in range(count)], [f"r{i}" for i in range(count)],
                         [[i, 7] for i in range(count)], {"wanted": list(range(count))}, None)


def cfg_of(url: str, **kwargs: Any) -> RewardConfig:
    return RewardConfig(fn="http", kwargs={"url": url, **kwargs})


def lengths(body: dict[str, Any], call: int) -> tuple[int, str]:
    return 200, json.dumps({"scores": [float(x) for x in body["columns"]["wanted"]]})


@pytest.fixture(autouse=True)
def _no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote, "FIRST_PAUSE", 0.01)


def test_parts_are_asked_at_once_and_their_scores_come_back_to_their_samples():
    gate = threading.Barrier(3, timeout=20)  # broken unless three requests are there together

    def meet(body: dict[str, Any], call: int) -> tuple[int, str]:
        gate.wait()
        return lengths(body, call)

    with answering(meet) as (url, asked):
        found = build_reward(cfg_of(url, concurrency=3)).score(request_of())
    assert found.scores == [0.0, 1.0, 2.0, 3.0, 4.0]
    bodies = sorted((each["body"] for each in asked), key=lambda body: body["responses"])
    assert bodies == [
        {"prompts": [f"p{i} " for i in part], "responses": [f"r{i}" for i in part],
         "response_ids": [[i, 7] for i in part], "columns": {"wanted": part}}
        for part in ([0, 1], [2, 3], [4])]


def test_a_bare_list_and_scores_a_token_are_understood():
    with answering(lambda body, call: (200, "[[1, 2], [0.5, 0.25]]")) as (url, _):
        found = build_reward(cfg_of(url)).score(request_of(2))
    assert found.dense == [[1.0, 2.0], [0.5, 0.25]]
    assert found.scores == [3.0, 0.75]


BAD = {
    "count": ((200, '{"scores": [1.0, 2.0]}'),
              "answered 200 with 2 scores for 5 samples (sample 0 to 4 of 5)"),
    "NaN": ((200, '{"scores": [1.0, NaN, 1.0, 1.0, 1.0]}'), "returned NaN for sample 1: 'p1 r1'"),
    "client's fault": ((422, '{"error": "needs a column \\nand more"}'),
                       "answered 422: 'needs a column'"),
    "always busy": ((503, "busy\nline two"), "answered 503: 'busy' (3 times in a row)"),
}


@pytest.mark.parametrize("case", BAD)
def test_a_bad_answer_names_address_status_and_sample(case):
    (status, text), said = BAD[case]
    with answering(lambda body, call: (status, text)) as (url, asked):
        with refused(RewardError, said, url, "fix:") as caught:
            build_reward(cfg_of(url, retries=2)).score(request_of())
        assert len(asked) == (3 if status == 503 else 1)
    assert caught.value.exit_code == 7


def test_failures_of_the_server_are_tried_again(caplog):
    def second_time(body: dict[str, Any], call: int) -> tuple[int, str]:
        return (500, "oops") if call == 1 else (429, "slow down") if call == 2 else lengths(body, 0)

    with answering(second_time) as (url, asked), caplog.at_level(logging.WARNING):
        assert build_reward(cfg_of(url)).score(request_of(2)).scores == [0.0, 1.0]
        assert len(asked) == 3
    assert f"{url} answered 500: 'oops'; trying again in 0.01 s (1 of 3)" in caplog.text
    assert "answered 429: 'slow down'; trying again in 0.02 s (2 of 3)" in caplog.text


def test_a_slow_answer_is_not_waited_for_and_not_asked_for_again():
    ended = threading.Event()

    def sleep(body: dict[str, Any], call: int) -> tuple[int, str]:
        ended.wait(20)
        return lengths(body, call)

    with answering(sleep) as (url, asked):
        started = time.monotonic()
        with pytest.raises(RewardError, match=r"did not answer within 0\.2 s") as caught:
            build_reward(cfg_of(url, timeout=0.2)).score(request_of())
        assert time.monotonic() - started < 5
        ended.set()
        assert len(asked) == 1
    assert caught.value.where == "reward.kwargs.timeout"


def test_a_server_that_is_not_there_is_told_when_the_reward_is_built():
    with pytest.raises(RewardError, match=r"could not be reached: ConnectError.*\(2 times"):
        build_reward(cfg_of("http://127.0.0.1:9/score", retries=1))


def test_headers_come_from_the_environment(monkeypatch):
    monkeypatch.setenv("MY_REWARD_VALUE", "s3cret")
    with answering(lengths) as (url, asked):
        build_reward(cfg_of(url, token_env="MY_REWARD_VALUE", headers=["X-Team: MY_REWARD_VALUE"])
                     ).score(request_of())
    assert asked[0]["headers"]["Authorization"] == "Bearer s3cret"
    assert asked[0]["headers"]["X-Team"] == "s3cret"


def test_a_value_that_was_sent_is_shown_nowhere_whatever_its_variable_is_called(monkeypatch):
    monkeypatch.setenv("MY_REWARD_VALUE", "pw123-pw123")
    with answering(lambda body, call: (400, "pw123-pw123 is unknown")) as (url, _):
        reward = build_reward(cfg_of(url, token_env="MY_REWARD_VALUE"))
        with pytest.raises(RewardError) as caught:
            reward.score(request_of())
    assert safe_text(str(caught.value)).count("'*** is unknown'") == 1


@pytest.mark.parametrize(("kwargs", "said"), [
    ({"url": "localhost:8123"}, "is not an address"),
    ({"url": "http://me:pw123@host/x"}, "holds a secret"),
    ({"url": "http://host/x?api_key=pw123"}, "holds a secret"),
    ({"retries": 1.5}, "a whole number from 0"), ({"timeout": 0}, "seconds above 0"),
    ({"token_env": "not_set_anywhere"}, "no variable"),
    ({"token_env": "my secret pw123"}, "not the name of a variable"),
    ({"headers": ["X-Key: pw123 abc"]}, "not of the form"), ({"tries": 3}, "no argument 'tries'")])
def test_wrong_arguments_are_refused_and_secrets_not_shown(kwargs, said):
    with refused(RewardError, said) as caught:
        build_reward(cfg_of(**{"url": "http://127.0.0.1:9/", "retries": 0, **kwargs}))
    assert "pw123" not in str(caught.value)


def test_columns_that_json_can_not_hold_are_named():
    request = RewardRequest(["p"], ["r"], [[1]], {"when": [{1, 2}], "x": [float("nan")]}, None)
    with answering(lambda body, call: (200, "[1]")) as (url, asked):
        reward = build_reward(cfg_of(url))
        with pytest.raises(RewardError, match="Prompt column 'when' holds a set"):
            reward.score(request)
        reward.score(RewardRequest(["p"], ["r\ud800"], [[1]], {"x": [float("nan")]}, None))
        assert asked[0]["body"]["columns"] == {"x": [None]}
        assert asked[0]["body"]["responses"] == ["r\ud800"]
