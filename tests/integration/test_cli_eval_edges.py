"""``ppocli eval`` and ``generate`` where something is odd: names, numbers, damage, and objects."""

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from helpers import save_lm, write_prompts
from runs import Ended, app_in_process, whole_copy

import ppocli
from ppocli.errors import CheckpointError, ConfigError

RUN = "runs/first"


@pytest.fixture
def here(reference: Path, world: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, with an apostrophe in its name: a run, its model and prompts."""
    (world / "o'b/runs").mkdir(parents=True)
    whole_copy(reference, world / "o'b" / RUN)
    monkeypatch.chdir(world / "o'b")
    return world / "o'b"


@pytest.fixture
def typed(capsys: pytest.CaptureFixture[str], command: object, here: Path,
          monkeypatch: pytest.MonkeyPatch) -> Callable[..., Ended]:
    """A command in this process, in :func:`here`."""
    monkeypatch.chdir(here)
    return app_in_process(capsys)


def test_a_folder_may_have_an_apostrophe_and_a_file_a_dollar(here, typed):
    write_prompts(here / "pr, =${y}.jsonl", ["the film"])
    done = typed("eval", RUN, "--prompts", "pr, =${y}.jsonl", "--seed", str(2**63 - 1), code=0)
    done = typed("generate", RUN, "-p", "the film", "--greedy", "generation.temperature=0.5")
    assert done.code == 0, done.err
    assert "no effect: temperature, as do_sample=false" in done.err


def test_the_limit_of_the_prompts_counts(here, typed):
    done = typed("eval", RUN, "prompts.limit=3", "--json")
    assert json.loads(done.out)["prompts"]["count"] == 3


@pytest.mark.parametrize(("given", "option"), [
    (["eval", "runs/frist"], "RUN"), (["eval", RUN, "--against", "runs/frist"], "--against"),
    (["eval", "frist"], "RUN")])
def test_a_misspelt_run_is_named(here, typed, given, option):
    done = typed(*given, code=3)
    assert f"\n  where: {option}\n" in done.err
    assert re.search("did you mean (runs/)?first", done.err)
    assert "RUN=" not in done.err
    assert "hf download runs" not in done.err


def test_a_model_says_what_is_not_followed(here, typed):
    from transformers import GenerationConfig

    lm = save_lm(here / "lm")
    GenerationConfig(do_sample=True, temperature=0.6, top_k=7, eos_token_id=1).save_pretrained(lm)
    write_prompts(here / "p.jsonl", ["the film"])
    given = ["eval", "./lm", "--prompts", "p.jsonl", "--reward", "length",
             "reward.kwargs.target=3"]
    told = "to sample as it says: "
    assert f"{told}generation.temperature=0.6 generation.top_k=7\n" in typed(*given).err
    done = typed(*given, "generation.temperature=0.6", "generation.top_k=7", "--json")
    assert told not in done.err
    assert json.loads(done.out)["generation"]["top_k"] == 7


def test_a_damaged_result_is_made_again(here, typed):
    given = ["eval", RUN, "--limit", "2", "--name", "x"]
    assert typed(*given).code == 0
    result = here / RUN / "eval/x/eval.json"
    whole = json.loads(result.read_text())
    for damage in ("{}", result.read_text()[:100]):
        result.write_text(damage)
        done = typed(*given, "--resume", code=0)
        assert f"{result} is damaged" in done.err
        assert json.loads(result.read_text())["figures"] == whole["figures"]


def test_samples_of_another_function_are_not_taken_up(here):
    run = here / RUN
    given = {"limit": 2, "name": "x", "resume": True}
    found = ppocli.evaluate(run, reward_fn=lambda outputs: [1.0] * len(outputs), **given)
    again = ppocli.evaluate(run, reward_fn=lambda outputs: [1.0] * len(outputs), **given)
    assert again.report == found.report
    with pytest.raises(CheckpointError, match=r"judges\.reward_fn: .* -> .*"):
        ppocli.evaluate(run, reward_fn=lambda outputs: [2.0] * len(outputs), **given)


def test_one_text_is_no_list_of_texts(here):
    run = ppocli.load_run(here / RUN)
    for prompts, sampling, message in (
            ("The film", {}, r"prompts is one text"), ([None], {}, "prompts holds None"),
            (["it"], {"max_new_tokens": "5"}, "max_new_tokens is '5'; it takes a whole number"),
            (["it"], {"top_k": True}, "top_k is True"),
            (["it"], {"stop_sequences": "."}, "it takes a list of texts"),
            (["it"], {"temperature": None}, "temperature is None")):
        with pytest.raises(ConfigError, match=message):
            run.generate(prompts, **sampling)
    for function in (lambda words: ppocli.evaluate(here / RUN, words), ppocli.train):
        with pytest.raises(ConfigError, match="overrides is one text"):
            function("generation.temperature=0.7")
    with pytest.raises(ConfigError, match="reward and reward_fn"):
        ppocli.evaluate(here / RUN, reward="length", reward_fn=len)
    assert ppocli.evaluate(here / RUN, ["reward.kwargs.target=3"], reward="length", limit=1).report[
        "settings"]["reward"]["fn"] == "length"


def test_a_run_is_asked_as_its_model_was_loaded(here):
    config = here / RUN / "config.yaml"
    config.write_text(config.read_text().replace("attn_implementation: null",
                                                 "attn_implementation: eager"))
    assert "attn_implementation: eager" in config.read_text()
    lm = ppocli.load_run(here / RUN)._player.loaded.lm
    assert lm.config._attn_implementation == "eager"


@pytest.mark.parametrize("value", ["nan", "inf", "-inf"])
def test_a_threshold_is_a_finite_number(here, typed, value):
    done = typed("eval", RUN, f"--min-reward={value}")
    assert (done.code, "is no finite number" in done.err) == (2, True)


def test_samples_reach_the_terminal_without_control_characters(tmp_path):
    from ppocli.cli.eval import _sample_lines

    path = tmp_path / "samples.jsonl"
    row = {"model": "policy", "prompt_index": 0, "sample": 0, "prompt": "a\x1b[31mb", "score": None,
           "response": "c\nd\x07" + "e" * 400}
    path.write_text(json.dumps(row) + "\n")
    lines = list(_sample_lines(path, 3))
    assert lines[1] == "prompt   a?[31mb"
    assert lines[2].startswith("policy   [-] c ⏎ d?eee")
    assert lines[2].endswith("e...")
    assert list(_sample_lines(path, 0)) == []


def test_progress_is_told_in_lines_where_there_is_no_terminal(monkeypatch, capsys):
    from ppocli.cli import eval as command

    clock = iter([0.0, 4.0, 12.0, 13.0])
    monkeypatch.setattr(command, "monotonic", lambda: next(clock))
    lines = command._Lines()
    for done in (10, 20, 40, 44):
        lines("policy", done, 100)
    assert capsys.readouterr().err == "policy: 40 of 100 samples, 12 s, about 24 s left\n"
