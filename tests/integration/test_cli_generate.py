"""``ppocli generate``: what is printed for which prompts, and how it ends."""

import io
import json
import sys

import pytest
from helpers import ppocli, save_talker, write_prompts
from runs import PLANTED, Ended, assert_no_process_left, spawn, whole_copy

from ppocli.cli.generate import _print_answer
from ppocli.config.text import CONTROL
from ppocli.sampling.prompting import Answer

TEXTS = ["the film", "i saw", "this plot was"]
SHORT = ("generation.max_new_tokens=6", "generation.min_new_tokens=2")


@pytest.fixture
def here(reference, world):
    """A folder with a finished run in ``runs``, beside the model and the prompts it had."""
    (world / "runs").mkdir()
    whole_copy(reference, world / "runs/first")
    return world


@pytest.fixture
def generate(app, monkeypatch):
    """The command in this process."""
    def command(*words: str, stdin: bytes | None = None, code: int | None = None) -> Ended:
        if stdin is not None:
            monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin)))
        return app("generate", *words, code=code)

    return command


def rows(ended: Ended) -> list[dict]:
    assert ended.code == 0, ended.said
    return [json.loads(line) for line in ended.out.splitlines()]


def test_one_prompt_gives_its_response_and_nothing_else(here):
    from ppocli.api import load_run

    done = ppocli("generate", "--prompt", "the film", "--score", cwd=here, HF_TOKEN=PLANTED, code=0)
    # the very response that Python gives, with the run's own sampling
    assert done.stdout == load_run(here / "runs/first").generate(["the film"])[0] + "\n"
    assert "using runs/first (the newest run)" in done.stderr
    assert "mean score of runs/first, step 4: " in done.stderr
    assert PLANTED not in done.stdout + done.stderr


def test_json_holds_a_sample_a_line(here, generate):
    every = rows(generate("first", *(w for t in TEXTS for w in ("-p", t)), "-n", "3", "--json",
                          "--reward", "length", "reward.kwargs.target=4", "seed=7", *SHORT))
    assert [(row["prompt"], row["sample"]) for row in every] == [
        (text, k) for text in TEXTS for k in range(3)]
    assert set(every[0]) == {"prompt", "sample", "response", "model", "score", "finished",
                             "response_tokens"}
    assert {row["model"] for row in every} == {"runs/first, step 4"}
    assert all(2 <= row["response_tokens"] <= 6 for row in every)
    # fewer prompts and samples, one at a time: the same ones
    assert rows(generate("first", "-p", TEXTS[0], "-n", "2", "--json", "seed=7", "ppo.chunk_size=1",
                         *SHORT)) == [{**row, "score": None} for row in every[:2]]
    others = rows(generate("first", "-p", TEXTS[0], "-n", "3", "--json", "seed=8", *SHORT))
    assert [row["response"] for row in others] != [row["response"] for row in every[:3]]


def test_standard_input_holds_a_prompt_a_line(world, generate):
    piped = rows(generate("./lm", "--json", *SHORT, stdin=b"\xef\xbb\xbfthe film\r\ni saw"))
    assert [row["prompt"] for row in piped] == ["the film", "i saw"]
    assert rows(generate("./lm", "--prompts", "-", "--json", *SHORT,
                         stdin=b"the film\n"))[0] == piped[0]
    assert "is not UTF-8" in generate("./lm", stdin=b"fine\n\xff\n", code=3).err
    assert "standard input is empty" in generate("./lm", stdin=b"\n", code=2).err


def test_metadata_columns_reach_the_reward(world, generate):
    (world / "mine.py").write_text(
        "def score(prompts, target, label):\n"
        "    return [t * (1 if kind == 'up' else -1) for t, kind in zip(target, label)]\n")
    write_prompts(world / "asked.jsonl", TEXTS, target=[1, 2, 3], label=["up", "down", "up"])
    asked = ("./lm", "--prompts", "asked.jsonl", "--reward", "mine.py:score", "--json")
    assert [row["score"] for row in rows(generate(*asked, "-n", "2", "ppo.chunk_size=5"))] == [
        1, 1, -2, -2, 3, 3]
    ended = generate("./lm", "-p", "it", "--reward", "mine.py:score", code=7)
    assert "needs an argument 'target' that nothing provides" in ended.err


@pytest.mark.slow
def test_a_chat_template_is_used_on_demand(here, generate):
    save_talker(here / "talker")
    chatting = ("prompts.chat=true", "--json", *SHORT)
    chat = rows(generate("./talker", "-p", "the film", *chatting))
    write_prompts(here / "warm.jsonl", ["the film"], system=["be warm"])
    warm = rows(generate("./talker", "--prompts", "warm.jsonl", *chatting))
    spelled = [rows(generate("./talker", "-p", text, "--json", *SHORT)) for text in (
        "you the film . i ", "we be warm . you the film . i ")]
    assert [chat[0]["response"], warm[0]["response"]] == [one[0]["response"] for one in spelled]
    assert chat[0]["prompt"] == "the film"
    lacking = generate("first", "-p", "x", "prompts.chat=true", code=3)
    assert "has no chat template" in lacking.err


@pytest.mark.slow
def test_checkpoints_and_sampling_of_a_model(here, generate):
    earlier = rows(generate("first", "-p", "the film", "--step", "1", "--json"))
    assert earlier[0]["model"] == "runs/first, step 1"
    path = rows(generate("runs/first/checkpoints/step-000001", "-p", "the film", "--json"))
    assert path[0]["response"] == earlier[0]["response"]
    (here / "lm/generation_config.json").write_text(
        '{"temperature": 0.3, "do_sample": true, "max_new_tokens": 3}')
    ended = generate("./lm", "-p", "the film", "--json", "generation.temperature=0.4")
    assert rows(ended)[0]["response_tokens"] <= 3
    assert "sampling as its generation_config.json says: max_new_tokens=3" in ended.err


def test_wrong_prompts_and_settings_are_refused(here, generate):
    (here / "odd.csv").write_text("text,n\nhello,1\n")
    for asked, code, message in (
            (("--prompts", "./nope"), 3, "nope does not exist"),
            (("-p", "x", "--prompts", "odd.csv"), 2, "can't be combined"),
            (("-p", "the film " * 40), 2, "The prompt has 80 tokens; with 8 new ones"),
            (("hello there",), 2, "is neither an option nor a setting"),
            (("-p", "x", "--step", "99"), 5, "step-000099"),
            (("-p", "x", "rollout.engine=transformers"), 2, "must be one of decode, vllm")):
        ended = generate("first", *asked, code=code)
        assert message in ended.err, ended.err
        assert ended.out == ""
    assert "--reward" in generate("./lm", "-p", "x", "--score", code=2).err


def test_control_characters_reach_neither_terminal_nor_pipe(capsys):
    answer = Answer(prompt=0, sample=0, text="a\x1b[2Jb\x9b1m\r\n\tc", ids=[1], finished=True)
    _print_answer(answer, None, ["p\x1b[1m", "q"], 1)
    out = capsys.readouterr().out
    assert r"a\x1b[2Jb\x9b1m" in out
    assert not CONTROL.search(out)


ENDLESS = ("generate", "./talker", "-p", "the film", "-n", "100000", "ppo.chunk_size=1", "--json",
           "generation.max_new_tokens=40", "generation.min_new_tokens=40")


@pytest.mark.slow
def test_what_was_generated_before_a_signal_is_there(tmp_path):
    save_talker(tmp_path / "talker")
    process = spawn(*ENDLESS, cwd=tmp_path)
    assert process.stdout is not None
    first = process.stdout.readline()
    process.terminate()
    out, err = process.communicate(timeout=60)
    assert process.returncode == 143, err
    assert all(json.loads(line)["response_tokens"] == 40 for line in (first + out).splitlines())
    assert err == "Stopped: stopped by SIGTERM\n"
    assert_no_process_left(process.pid)
