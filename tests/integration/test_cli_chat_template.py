"""Chat templates of runs: how a model was trained decides whether prompts are rendered, and the
date that a template tells is that of the run's first start."""

import json
import shutil
from datetime import datetime
from pathlib import Path

import pytest
from helpers import TEMPLATE, jsonl, read_json, save_talker, write_jsonl

SPIES = '''\
def rendered(prompts, outputs, **columns):
    return [float(" . i" in prompt) + i / 100 for i, prompt in enumerate(prompts)]
'''
ASKED = [{"role": "user", "content": "the film"}]
ANSWER = [{"role": "assistant", "content": "very good"}]
DATA = {"messages": {"messages": ASKED + ANSWER},
        "plain": {"prompt": "the film", "completion": "very good"}}
SHORT = ("hardware.device=cpu", "hardware.num_threads=1", "hardware.gemm=default",
         "generation.max_new_tokens=3", "checkpoint.every_steps=1", "checkpoint.keep_last=9")
SFT = ("sft", "data.path=data.jsonl", "sft.mini_batch_size=2", "sft.optimizer.lr=1e-3", *SHORT)
PPO = ("train", "prompts.path=prompts.jsonl", "reward.fn=spies.py:rendered", "ppo.num_rollouts=4",
       "ppo.mini_batch_size=4", "eval.every_steps=1", "prompts.eval.limit=2", *SHORT)
RECORD = "trained_with_chat_template"


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, with a model that has a chat template, prompts and a reward that is 1 for
    what the template has rendered."""
    save_talker(tmp_path / "talker", max_position_embeddings=128)
    write_jsonl(tmp_path / "prompts.jsonl", [{"prompt": f"the {one}"} for one in (
        "film", "plot", "actor", "story")])
    (tmp_path / "spies.py").write_text(SPIES)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def record(folder: str) -> bool | None:
    return read_json(Path(folder) / "tokenizer_config.json").get(RECORD)


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "trained"), [("messages", True), ("plain", False)])
def test_how_a_model_was_trained_decides_how_it_is_prompted(kind, trained, here, app):
    write_jsonl(here / "data.jsonl", [DATA[kind]] * 4)
    app(*SFT, "model.path=talker", "sft.epochs=1", "run_name=s", code=0)
    shutil.copytree("runs/s/model", "model")
    assert (record("model"), record("talker")) == (trained, None)
    app("export", "runs/s", "-o", "exported", code=0)
    asks = ["-p", "the film", "--reward", "spies.py:rendered", "--json"]
    def scored(*words: str) -> tuple[float, str]:
        done = app("generate", *words, *asks, code=0)
        return json.loads(done.out)["score"], done.err

    for model, name in (("runs/s", "runs/s, step 2"), ("model", "model"), ("exported", "exported")):
        score, notes = scored(model)
        assert score == bool(trained)
        assert f"{name} was trained with" in notes
    assert scored("model", f"prompts.chat={str(not trained).lower()}")[0] == (not trained)
    done = app("eval", "model", "--prompts", "prompts.jsonl", "--reward", "spies.py:rendered",
               "--json", code=0)
    assert round(json.loads(done.out)["figures"]["reward_mean"]) == bool(trained)
    assert "model was trained with" in done.err


@pytest.mark.slow
def test_ppo_goes_on_as_the_model_was_trained(here, app):
    write_jsonl(here / "data.jsonl", [DATA["messages"]] * 4)
    app(*SFT, "model.path=talker", "sft.epochs=1", "run_name=s", code=0)
    for name, words, chat in (("auto", [], True), ("plain", ["prompts.chat=false"], False)):
        done = app(*PPO, "model.path=runs/s", "ppo.num_steps=1", f"run_name={name}", *words, code=0)
        assert "was trained with its chat template" in done.said
        shown = jsonl(Path(f"runs/{name}/samples.jsonl"))[0]["prompt"]
        assert shown == ("you the film . i " if chat else "the film")
        assert record(f"runs/{name}/model") is chat
        assert f"\n  chat: {str(chat).lower()}\n" in Path(f"runs/{name}/config.yaml").read_text()
        score = app("generate", f"runs/{name}", "-p", "the film", "--score", "--json", code=0).out
        assert json.loads(score)["score"] == chat
        app("resume", f"runs/{name}", "ppo.num_steps=2", code=0)
    app(*PPO, "model.path=runs/s", "ppo.num_steps=2", "run_name=auto", "resume=auto", code=0)


# The date -----------------------------------------------------------------------------------------

NOW = ('on {{ strftime_now("%Y-%m-%dT%H:%M:%S") }} '
       '{% for _ in range(strftime_now("%S") | int) %}the {% endfor %}')
"""as words that the tokenizer has, so that other seconds are other ids"""


@pytest.fixture
def dated(here: Path) -> Path:
    """The same, with data, and a template that tells the second."""
    (here / "t.jinja").write_text(NOW + TEMPLATE)
    write_jsonl(here / "data.jsonl", [DATA["messages"]] * 4)
    return here


def date_of(name: str) -> str | None:
    from ppocli.config.config_yaml import read_config

    return read_config(Path(f"runs/{name}/config.yaml")).model.chat_template_date


@pytest.mark.slow
def test_a_template_tells_when_the_run_was_first_started(dated, app):
    words = (*PPO, "prompts.chat=true", "model.path=talker", "model.chat_template=t.jinja",
             "run_name=r")
    begun = datetime.now().replace(microsecond=0)
    app(*words, "ppo.num_steps=1", code=0)
    date = date_of("r")
    assert begun <= datetime.fromisoformat(date) <= datetime.now()
    app("resume", "runs/r", "ppo.num_steps=2", code=0)  # seconds later
    assert date_of("r") == date
    other = datetime.fromisoformat(date).second ^ 1
    assert "Not what the run was started with" in app(
        "resume", "runs/r", "ppo.num_steps=4",
        f"model.chat_template_date=2026-01-05T10:00:{other:02}", code=5).err
    # whoever loads the model tells the present
    assert (dated / "runs/r/model/chat_template.jinja").read_text() == NOW + TEMPLATE
    app("eval", "runs/r", "--name", "e", code=0)
    for file in ("samples.jsonl", "eval/e/samples.jsonl"):
        assert {row["prompt"].split()[1] for row in jsonl(dated / "runs/r" / file)} == {date}


def test_values_of_a_template_and_wrong_dates(dated, app):
    (dated / "t.jinja").write_text("{%- if day is not defined %}{% set day = strftime_now('%d') %}"
                                   "{% endif %}day {{ day }} " + TEMPLATE)
    words = (*PPO, "prompts.chat=true", "model.path=talker", "model.chat_template=t.jinja",
             "ppo.num_steps=1")
    app(*words, "run_name=r", "model.chat_template_kwargs.day=26 Jul 2024", code=0)
    assert jsonl(dated / "runs/r/samples.jsonl")[0]["prompt"].startswith("day 26 Jul 2024 you")
    for wrong in ("2026-13-01", "2026-01-05T10:00:00+01:00"):
        assert "must be a local date, such as" in app(
            *words, f"model.chat_template_date={wrong}", code=2).err
