"""A model behind an OpenAI-compatible server as the reward."""

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from ppocli.errors import RewardError
from ppocli.rewards.judge import Judge
from ppocli.rewards.reward_records import RewardRequest

RUBRIC = "How kind is the response? {Braces} stay."


class Server(ThreadingHTTPServer):
    """Replies to a question with what ``replies`` has for the response in it, one after another."""

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        self.asked, self.replies, self.failures = [], {}, 0
        self.url = f"http://127.0.0.1:{self.server_port}/v1"


class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_error(405)

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        question = body["messages"][0]["content"]
        self.server.asked.append((self.path, self.headers["Authorization"], body))
        if self.server.failures:
            self.server.failures -= 1
            self.send_error(503)
            return
        response = question.partition("<response>\n")[2].partition("\n</response>")[0]
        replies = self.server.replies[response]
        reply = replies.pop(0) if len(replies) > 1 else replies[0]
        content = json.dumps({"choices": [{"message": {"content": reply}}]}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_):
        pass


@pytest.fixture
def server():
    with Server() as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server
        server.shutdown()


def request_of(*responses):
    return RewardRequest(prompts=["Hello"] * len(responses), responses=list(responses),
                         response_ids=[[1]] * len(responses), columns={}, tokenizer=None)


def judge_of(server, tmp_path, **kwargs):
    return Judge(server.url, "m", RUBRIC, cache=str(tmp_path / "replies.jsonl"), **kwargs)


def test_scores_are_read_and_no_question_is_asked_twice(server, tmp_path, monkeypatch):
    monkeypatch.setenv("JUDGE_KEY", "abc")
    server.replies = {"hi": ["Kind.\n\n**Score: 7.5**"], "go": ["2/10"], "{prompt}": ["score: 0"]}
    judge = judge_of(server, tmp_path, token_env="JUDGE_KEY")
    request = request_of("hi", "go", "hi", "{prompt}")
    assert judge(request) == [7.5, 2.0, 7.5, 0.0]
    assert request.logs.columns["judge"][0] == "Kind.\n\n**Score: 7.5**"
    assert len(server.asked) == 3
    path, token, body = server.asked[0]
    assert (path, token) == ("/v1/chat/completions", "Bearer abc")
    assert (body["model"], body["temperature"]) == ("m", 0.0)
    assert RUBRIC in body["messages"][0]["content"]
    # as a resumed run does, after a crash in the middle of a line
    with (tmp_path / "replies.jsonl").open("a") as file:
        file.write('{"key": "ab')
    assert judge_of(server, tmp_path, token_env="JUDGE_KEY")(request_of("hi", "go")) == [7.5, 2.0]
    assert len(server.asked) == 3


def test_a_reply_without_a_score_in_range_is_asked_for_again(server, tmp_path):
    server.replies = {"hi": ["Good!", "Score: 11", "Score: 9"], "go": ["I give it 7 of 10"]}
    judge = judge_of(server, tmp_path, retries=2)
    assert judge(request_of("hi", "go")) == [9.0, None]
    assert [body["temperature"] for _, _, body in server.asked].count(1.0) == 4


def test_a_server_that_fails_for_a_moment_is_asked_again(server, tmp_path, monkeypatch):
    monkeypatch.setattr("ppocli.rewards.remote.FIRST_PAUSE", 0.01)
    server.replies, server.failures = {"hi": ["Score: 3"]}, 2
    assert judge_of(server, tmp_path)(request_of("hi")) == [3.0]


@pytest.mark.parametrize(("kwargs", "key"), [
    ({"low": 3, "high": 3}, "high"), ({"template": "{prompt}"}, "template"),
    ({"concurrency": 0}, "concurrency")])
def test_arguments_that_make_no_sense(server, tmp_path, kwargs, key):
    with pytest.raises(RewardError) as caught:
        judge_of(server, tmp_path, **kwargs)
    assert caught.value.where == f"reward.kwargs.{key}"
