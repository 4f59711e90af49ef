"""Verifiers and tasks of other packages: math-verify and reasoning-gym themselves."""

import os
import signal
import sys

import pytest
from helpers import checked, refused

import ppocli
from ppocli.config.schema import PromptsConfig
from ppocli.config.schema_training import DataConfig
from ppocli.data.examples import read_examples
from ppocli.data.gym_tasks import ReasoningGym, gym_rows
from ppocli.data.sources import open_rows, training_spec
from ppocli.errors import InputError
from ppocli.launch.input_checks import missing_inputs
from ppocli.rewards.math_reward import Math

LOGGED = {}


def log_extra(column, values):
    LOGGED[column] = values


@pytest.fixture(scope="module")
def judge():
    pytest.importorskip("math_verify")
    return Math(seconds=2)


def test_equal_expressions_are_right_in_any_form(judge):
    scores = judge([r"So it is \boxed{\frac{1}{2}}.", "0.5", "The answer is 3/4", "none", "$1+x$"],
                   log_extra, answer=["0.5", r"\frac{2}{4}", "0.5", "0.5", "$x+1$"])
    assert scores == [1.0, 1.0, 0.0, 0.0, 1.0]
    assert LOGGED["pred"][2:4] == ["3/4", None]


@pytest.mark.slow
def test_a_process_that_does_not_answer_is_replaced_and_the_response_is_wrong(judge):
    assert judge(["1"], log_extra, answer=["1"]) == [1.0]
    first = judge._process
    os.kill(first.pid, signal.SIGSTOP)
    judge.seconds = 1
    assert judge(["1"], log_extra, answer=["1"]) == [0.0]
    assert first.poll() == -signal.SIGKILL
    assert judge(["1"], log_extra, answer=["1"]) == [1.0]


def spec(**keys):
    return training_spec(PromptsConfig(path="reasoning_gym:chain_sum", **keys), None)


@pytest.fixture(scope="module")
def gym():
    pytest.importorskip("reasoning_gym")


def test_questions_are_those_of_their_seed_and_right_answers_score_1(gym):
    rows = [list(open_rows(spec(kwargs={"size": 4, **seed}), []))
            for seed in ({}, {"seed": 0}, {"seed": 1})]
    questions = [[row.values["prompt"] for row in each] for each in rows]
    assert questions[0] == questions[1] != questions[2]
    answers = [row.values["answer"] for row in rows[0]]
    responses = [f"Hm.\n<answer> {answer}\n</answer> That is it." for answer in answers]
    entries = [row.values["entry"] for row in rows[0]]
    assert ReasoningGym()(responses, log_extra, entry=entries) == [1.0] * 4
    assert LOGGED["pred"] == answers
    assert ReasoningGym("whole")(answers, log_extra, entry=entries) == [1.0] * 4
    assert ReasoningGym("last_line")([f"so\n{one}" for one in answers], log_extra,
                                     entry=entries) == [1.0] * 4
    assert ReasoningGym()(answers, log_extra, entry=entries) == [0.0] * 4, "no tag"


def test_their_answers_are_examples(gym):
    cfg = DataConfig(path="reasoning_gym:coin_flip", columns={"completion": "answer"},
                     kwargs={"size": 3, "min_trials": 1, "max_trials": 2})
    rows = list(open_rows(training_spec(PromptsConfig(path=cfg.path, kwargs=cfg.kwargs), None), []))
    assert [(one.prompt, one.completion) for one in read_examples(
        cfg, wants="completions").examples] == [
            (row.values["prompt"], row.values["answer"]) for row in rows]


@pytest.mark.parametrize(("name", "kwargs", "message"), [
    ("chainsum", {}, "no task 'chainsum'"), ("chain_sum", {"terms": 3}, "refuses its arguments")])
def test_tasks_and_arguments_that_there_are_not(gym, name, kwargs, message):
    with pytest.raises(InputError, match=message):
        list(gym_rows(name, kwargs, "prompt", "prompts.path"))


@pytest.fixture
def no_libraries(monkeypatch):
    for name in ("math_verify", "reasoning_gym", "openenv"):
        monkeypatch.setitem(sys.modules, name, None)


def test_every_library_that_is_missing_is_named_with_its_extra(no_libraries):
    config = checked(
        "+recipe=guess_number", "env.fn=openenv", "env.kwargs.url=http://127.0.0.1:8000",
        "reward.fns.a.fn=math", "reward.fns.b.fn=reasoning_gym", "ppo.ptx.coef=1",
        "ppo.ptx.data.path=reasoning_gym:chain_sum").config
    problems = missing_inputs(config)
    assert [(one.where, one.fix) for one in problems] == [
        ("reward.fns.a.fn", "pip install 'ppocli[math]'"),
        ("reward.fns.b.fn", "pip install 'ppocli[gym]'"),
        ("env.fn", "pip install 'ppocli[openenv]'"),
        ("ppo.ptx.data.path", "pip install 'ppocli[gym]'")]
    assert {(one.code, one.exit_code) for one in problems} == {("not-installed", 3)}


@pytest.mark.parametrize("words", [
    ["+recipe=guess_number", "env.fn=openenv", "env.kwargs.url=http://127.0.0.1:8000"],
    ["+recipe=quickstart", "reward.fn=math", "reward.kwargs={}"],
    ["task=sft", "model=reviews", "data.path=reasoning_gym:chain_sum",
     "data.columns.completion=answer"]])
def test_without_its_library_a_run_leaves_nothing(no_libraries, tmp_path, words):
    with refused(InputError, "which is not installed"):
        ppocli.train([*words, f"output_dir={tmp_path / 'runs'}"])
    assert not any(tmp_path.iterdir())
