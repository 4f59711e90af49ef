"""A model behind an OpenAI-compatible server as the reward."""

import json
from contextlib import contextmanager

from test_rewards_remote import answering

from ppocli.rewards.judge import Judge
from ppocli.rewards.reward_records import RewardRequest

RUBRIC = "How kind is the response? {Braces} stay."


@contextmanager
def judging(tmp_path, replies, failures=0, **kwargs):
    """Makes judges that ask a server, which replies to a question with what ``replies`` has for the
    response in it, one after another; and what it was asked."""
    def answer(body, call):
        if call <= failures:
            return 503, ""
        question = body["messages"][0]["content"]
        left = replies[question.partition("<response>\n")[2].partition("\n</response>")[0]]
        reply = left.pop(0) if len(left) > 1 else left[0]
        return 200, json.dumps({"choices": [{"message": {"content": reply}}]})

    with answering(answer) as (url, asked):
        yield lambda: Judge(url, "m", RUBRIC, cache=str(tmp_path / "replies.jsonl"),
                            **kwargs), asked


def request_of(*responses):
    return RewardRequest(prompts=["Hello"] * len(responses), responses=list(responses),
                         response_ids=[[1]] * len(responses), columns={}, tokenizer=None)


def test_scores_are_read_and_no_question_is_asked_twice(tmp_path, monkeypatch):
    monkeypatch.setenv("JUDGE_KEY", "abc")
    replies = {"hi": ["Kind.\n\n**Score: 7.5**"], "go": ["2/10"], "{prompt}": ["score: 0"]}
    with judging(tmp_path, replies, token_env="JUDGE_KEY") as (judge_of, asked):
        request = request_of("hi", "go", "hi", "{prompt}")
        assert judge_of()(request) == [7.5, 2.0, 7.5, 0.0]
        assert request.logs.columns["judge"][0] == "Kind.\n\n**Score: 7.5**"
        assert len(asked) == 3
        body = asked[0]["body"]
        assert asked[0]["headers"]["Authorization"] == "Bearer abc"
        assert (body["model"], body["temperature"]) == ("m", 0.0)
        assert RUBRIC in body["messages"][0]["content"]
        # as a resumed run does, after a crash in the middle of a line
        with (tmp_path / "replies.jsonl").open("a") as file:
            file.write('{"key": "ab')
        assert judge_of()(request_of("hi", "go")) == [7.5, 2.0]
        assert len(asked) == 3


def test_a_reply_without_a_score_in_range_is_asked_for_again(tmp_path):
    replies = {"hi": ["Good!", "Score: 11", "Score: 9"], "go": ["I give it 7 of 10"]}
    with judging(tmp_path, replies, retries=2) as (judge_of, asked):
        assert judge_of()(request_of("hi", "go")) == [9.0, None]
        assert [each["body"]["temperature"] for each in asked].count(1.0) == 4


def test_a_server_that_fails_for_a_moment_is_asked_again(tmp_path, monkeypatch):
    monkeypatch.setattr("ppocli.rewards.remote.FIRST_PAUSE", 0.01)
    with judging(tmp_path, {"hi": ["Score: 3"]}, failures=2) as (judge_of, _):
        assert judge_of()(request_of("hi")) == [3.0]
