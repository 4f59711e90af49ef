"""``ppocli generate``: what is printed for which prompts, and how it ends."""

import io
import json
import signal
import sys
from pathlib import Path

import pytest
from helpers import jsonl, ppocli, save_talker, write_jsonl, write_prompts
from runs import PLANTED, Ended, assert_no_process_left, run, spawn, whole_copy, words

from ppocli.cli.generate import ResponsePrinter
from ppocli.config.text import CONTROL
from ppocli.sampling.prompting import Answer

TEXTS = ["the film", "i saw", "this plot was"]
SHORT = ("--max-new-tokens", "6", "--min-new-tokens", "2")


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
    assert "score " in done.stderr
    assert PLANTED not in done.stdout + done.stderr


def test_several_prompts_and_samples_are_blocks(here, generate):
    ended = generate("first", "-p", "the film", "-p", "i saw\nit", "-n", "2", "--score", *SHORT)
    assert ended.code == 0
    lines = ended.out.splitlines()
    assert lines[0] == "== prompt 1: the film"
    assert lines[1].startswith("-- sample 1, score ")
    assert lines[3].startswith("-- sample 2, score ")
    assert "== prompt 2: i saw ⏎ it" in lines
    assert "mean score of runs/first, step 4: " in ended.err
    assert "(4 scored)" in ended.err


def test_json_holds_a_sample_a_line(here, generate):
    found = rows(generate("first", *(w for t in TEXTS for w in ("-p", t)), "-n", "3", "--json",
                          "--reward", "length", "reward.kwargs.target=4", "--seed", "7", *SHORT))
    assert [(row["prompt"], row["sample"]) for row in found] == [
        (text, k) for text in TEXTS for k in range(3)]
    assert set(found[0]) == {"prompt", "sample", "response", "model", "score", "finished",
                             "response_tokens"}
    assert {row["model"] for row in found} == {"runs/first, step 4"}
    assert all(2 <= row["response_tokens"] <= 6 for row in found)
    # fewer prompts and samples: the same ones
    assert rows(generate("first", "-p", TEXTS[0], "--json", "--seed", "7", *SHORT)) == [
        {**found[0], "score": None}]
    others = rows(generate("first", "-p", TEXTS[0], "-n", "3", "--json", "--seed", "8", *SHORT))
    assert [row["response"] for row in others] != [row["response"] for row in found[:3]]


def test_two_models_side_by_side(here, shared_world, generate):
    found = rows(generate("first", "-p", "the film", "-n", "2", "--against", "base", "--json"))
    assert [row["model"] for row in found] == [
        "runs/first, step 4", f"{shared_world / 'lm'} (base)"] * 2
    alone = rows(generate("./lm", "-p", "the film", "-n", "2", "--json",
                          "generation.max_new_tokens=8"))
    assert [row["response"] for row in found[1::2]] == [row["response"] for row in alone]
    ended = generate("first", "-p", "the film", "--against", "./lm", "--score", code=0)
    assert ended.out.startswith("== prompt 1: the film\n┌")
    heading = ended.out.splitlines()[2]
    assert "runs/first, step 4" in heading
    assert "./lm" in heading
    assert ended.err.count("mean score of") == 2


def test_standard_input_holds_a_prompt_a_line(world, generate):
    piped = rows(generate("./lm", "--json", *SHORT, stdin=b"\xef\xbb\xbfthe film\r\ni saw"))
    assert [row["prompt"] for row in piped] == ["the film", "i saw"]
    assert rows(generate("./lm", "--prompts", "-", "--json", *SHORT,
                         stdin=b"the film\n"))[0] == piped[0]
    wrong = generate("./lm", stdin=b"fine\n\xff\n")
    assert (wrong.code, wrong.err.splitlines()[0]) == (
        3, "Error: Line 2 of standard input is not UTF-8.")
    empty = generate("./lm", stdin=b"\n", code=2)
    assert empty.err == (
        "Error: There are no prompts: standard input is empty.\n"
        "  where: command line\n"
        "  fix:   give --prompt TEXT, --prompts FILE (json, jsonl, csv, tsv, parquet or txt), or "
        "prompts on standard input, one per line\n")


def test_metadata_columns_reach_the_reward(world, generate):
    (world / "mine.py").write_text(
        "def score(prompts, target, label):\n"
        "    return [t * (1 if kind == 'up' else -1) for t, kind in zip(target, label)]\n")
    write_prompts(world / "asked.jsonl", TEXTS, target=[1, 2, 3], label=["up", "down", "up"])
    asked = ("./lm", "--prompts", "asked.jsonl", "--reward", "mine.py:score", "--json")
    assert [row["score"] for row in rows(generate(*asked, "-n", "2", "--batch-size", "5"))] == [
        1, 1, -2, -2, 3, 3]
    ended = generate("./lm", "-p", "it", "--reward", "mine.py:score", code=7)
    assert "needs an argument 'target' that nothing provides" in ended.err


def test_a_chat_template_is_used_on_demand_or_as_in_the_run(here, generate):
    save_talker(here / "talker")
    plain = rows(generate("./talker", "-p", "the film", "--json", *SHORT))
    chat = rows(generate("./talker", "-p", "the film", "--json", "--chat", *SHORT))
    warm = rows(generate("./talker", "-p", "the film", "--json", "--chat", "--system", "be warm",
                         *SHORT))
    spelled = [rows(generate("./talker", "-p", text, "--json", *SHORT)) for text in (
        "you the film . i ", "we be warm . you the film . i ")]
    assert [chat[0]["response"], warm[0]["response"]] == [one[0]["response"] for one in spelled]
    assert plain[0]["response"] != chat[0]["response"]
    assert chat[0]["prompt"] == "the film"
    (here / "talks.jsonl").write_text('{"prompt": [{"role": "user", "content": "the film"}]}\n')
    asked = rows(generate("./talker", "--prompts", "talks.jsonl", "--json", "--chat", *SHORT))
    assert asked[0]["response"] == chat[0]["response"]
    assert asked[0]["prompt"] == "you the film . i "
    assert rows(generate("./talker", "-p", "the film", "--json", "prompts.chat=true",
                         *SHORT)) == chat
    lacking = generate("first", "-p", "x", "--chat")
    assert (lacking.code, lacking.err.splitlines()[0]) == (
        3, "Error: The tokenizer of runs/first, step 4 has no chat template.")
    assert "--system needs a conversation" in generate("first", "-p", "x", "--system", "y").err
    assert "fix:   --chat" in generate("./talker", "--prompts", "talks.jsonl").err


@pytest.mark.slow
def test_the_template_of_a_run_goes_with_its_model(world, app, generate):
    file = world / "t.jinja"
    file.write_text("{% for m in messages %}{{ tone }} {{ m.content }} . {% endfor %}"
                    "{% for tool in tools or [] %}{{ tool.name }}{% endfor %}")
    run("train", *words("run_name=toned", "ppo.num_steps=1", "prompts.chat=true",
                        "model.chat_template=t.jinja", "model.chat_template_kwargs={tone: warm}"),
        cwd=world, code=0)
    assert "warm the film . " in prompts(world / "runs/toned/samples.jsonl")
    file.unlink()
    warm, cold = (rows(generate("toned", "-p", f"{tone} the film . ", "--no-chat", "--json",
                                "--num-samples", "9")) for tone in ("warm", "cold"))
    asked = ["toned", "-p", "the film", "--json", "--num-samples", "9"]
    assert responses(rows(generate(*asked))) == responses(warm) != responses(cold)
    assert responses(rows(generate(*asked, "model.chat_template_kwargs={tone: cold}"))) \
        == responses(cold)
    assert "model.chat_template would change nothing" in generate(
        *asked, "model.chat_template=t.jinja", code=2).err
    write_jsonl(world / "tools.jsonl", [{"prompt": "the film", "tools": [{"name": "it"}]}])
    for keys, rendered in (((), "warm the film . "),
                           (("prompts.tools=tools",), "warm the film . it")):
        found = generate("toned", "--prompts", "tools.jsonl", "--json", *keys)
        assert responses(rows(found)) == responses(rows(generate(
            "toned", "-p", rendered, "--no-chat", "--json")))
    save_talker(world / "talker")  # whose template reads no tone
    app("eval", "toned", "--against", "./talker", code=0)
    judged, = (world / "runs/toned").glob("*/*/samples.jsonl")
    assert "warm the film . " in prompts(judged)


def prompts(path: Path) -> list[str]:
    return [row["prompt"] for row in jsonl(path)]


def responses(found: list[dict]) -> list[str]:
    return [row["response"] for row in found]


def test_checkpoints_and_sampling_of_a_model(here, generate):
    earlier = rows(generate("first", "-p", "the film", "--step", "1", "--json"))
    assert earlier[0]["model"] == "runs/first, step 1"
    path = rows(generate("runs/first/checkpoints/step-000001", "-p", "the film", "--json"))
    assert path[0]["response"] == earlier[0]["response"]
    (here / "lm/generation_config.json").write_text(
        '{"temperature": 0.3, "do_sample": true, "max_new_tokens": 3}')
    ended = generate("./lm", "-p", "the film", "--json", "--temperature", "0.4")
    assert rows(ended)[0]["response_tokens"] <= 3
    assert "sampling as its generation_config.json says: max_new_tokens=3" in ended.err
    worded = generate("./lm", "-p", "the film", "--json", "generation.max_new_tokens=5")
    assert "max_new_tokens" not in worded.err
    greedy = generate("./lm", "-p", "the film", "-n", "3", "--greedy", "--json",
                      "generation.top_p=0.5")
    assert len({row["response"] for row in rows(greedy)}) == 1
    assert "no effect: top_p, as do_sample=false" in greedy.err


def test_wrong_prompts_and_settings_are_told(here, generate):
    (here / "odd.csv").write_text("text,n\nhello,1\n")
    for asked, code, message in (
            (("--prompts", "nope"), 3, "Prompt file or folder nope does not exist"),
            (("--prompts", "odd.csv"), 3, "  where: --column prompt\n  fix:   --column text"),
            (("-p", "x", "--prompts", "odd.csv"), 2, "can't be combined"),
            (("--env", "-p", "x", "--prompts", "odd.csv"), 2, "can't be combined"),
            (("--env", "-p", " "), 2, "The prompt ' ' is empty"),
            (("-p", "  "), 2, "The prompt '  ' is empty"),
            (("-p", "the film " * 40), 2, "The prompt has 80 tokens; with 8 new ones"),
            (("hello there",), 2, "prompts need an option: --prompt TEXT"),
            (("-p", "x", "--step", "99"), 5, "step-000099"),
            (("-p", "x", "--temperature", "0"), 2,
             "generation.temperature: 0 must be > 0 (from --temperature)"),
            (("-p", "x", "--min-new-tokens", "9"), 2, "min_new_tokens 9 must be at most"),
            (("-p", "x", "--stop", ""), 2, "must not hold an empty text"),
            (("-p", "x", "--seed", str(2**64)), 2, "is too large"),
            (("-p", "x", "--min-p", "2"), 2, "must be >= 0 and <= 1 (from --min-p)"),
            (("-p", "x", "--greedy", "--top-k", "3"), 2, "--top-k would change"),
            (("-p", "x", "ppo.gamma=0.3"), 2, "ppo.gamma would change nothing"),
            (("-p", "x", "prompts.path=odd.csv"), 2, "prompts.path would change nothing"),
            (("-p", "x", "seed=7"), 2, "leave it out; --seed N is theirs"),
            (("-p", "x", "reward.fn=nowhere.py:f"), 2, "leave it out; --score has them scored")):
        ended = generate("first", *asked, code=code)
        assert message in ended.err, ended.err
        assert ended.out == ""
    asked = generate("./lm", "-p", "x", "--score")
    assert (asked.code, "--reward" in asked.err) == (2, True)
    assert generate("./nothing", "-p", "x").code == 3


@pytest.mark.parametrize("terminal", [False, True])
def test_control_characters_reach_neither_terminal_nor_pipe(terminal, monkeypatch, capsys):
    monkeypatch.setattr(sys.stdout, "isatty", lambda: terminal, raising=False)
    answer = Answer(prompt=0, sample=0, text="a\x1b[2Jb\x9b1m\r\n\tc", ids=[1], finished=True)
    for names in (["one"], ["one", "two"]):
        printer = ResponsePrinter(["p", "q"], names, 1, as_json=False, scored=False)
        printer.write([[answer]] * len(names), [[None]] * len(names))
        said = capsys.readouterr().out
        assert r"a\x1b[2Jb\x9b1m" in said
        assert not CONTROL.search(said)


ENDLESS = ("generate", "./talker", "-p", "the film", "-n", "100000", "--batch-size", "1", "--json",
           "--max-new-tokens", "40", "--min-new-tokens", "40")


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


@pytest.mark.slow
def test_a_reader_that_leaves_ends_it_quietly(tmp_path):
    save_talker(tmp_path / "talker")
    with spawn(*ENDLESS, cwd=tmp_path) as process:
        assert json.loads(process.stdout.readline())["sample"] == 0
        process.stdout.close()
        assert process.wait(timeout=60) == 128 + signal.SIGPIPE
        assert process.stderr.read() == ""
