"""What looks at runs, of those that were trained on a data set: loss, perplexity and accuracy where
PPO has reward and KL."""

import json
import re
from pathlib import Path

import pytest
import torch
from helpers import jsonl, read_json
from reported import Page

import ppocli
from ppocli.config.config_yaml import read_config
from ppocli.distributed import onednn
from ppocli.errors import PpocliError

pytestmark = pytest.mark.usefixtures("beside_data_runs")


def row(run):
    """The last row of metrics.jsonl."""
    return jsonl(Path(f"runs/{run}/metrics.jsonl"))[-1]


def read(name):
    return Path(name).read_text(encoding="utf-8")


@pytest.mark.parametrize(("run", "name", "best"), [("sft", "loss", min), ("rm", "accuracy", max)])
def test_lists_plots_and_comparisons_show_what_was_trained(app, run, name, best):
    found = {info["name"]: info for info in json.loads(app("runs", "list", "--json").out)}[run]
    rows = jsonl(Path(f"runs/{run}/metrics.jsonl"))
    assert found["best"] == best(each[f"eval/{name}"] for each in rows if f"eval/{name}" in each)
    assert (found["loss"], found["reward_mean"]) == (rows[-1]["loss/total"], None)
    assert f"loss {rows[-1]['loss/total']:.3f}" in app("runs", "list").out
    drawn = json.loads(app("plot", f"runs/{run}", "--json").out)["series"]
    assert [each["metric"] for each in drawn] == ["loss/total", f"eval/{name}"]
    seen = app("watch", f"runs/{run}")
    assert re.search(rf"^step 2/2  loss {rows[-1]['loss/total']:.3f}  ", seen.out, re.MULTILINE)
    assert re.search(rf"{name} [\d.]+ -> {rows[-1][f'eval/{name}']:.3f}; model", seen.said)


@pytest.mark.parametrize(("run", "title", "said"), [
    ("sft", "supervised fine-tuning report", r"Loss \(nats\) on the held-back data [\d.]+ → "),
    ("rm", "reward-model training report", r"standard error over \d pairs\)?")])
def test_reports(app, run, title, said):
    app("report", f"runs/{run}", code=0)
    text = Page(Path(f"runs/{run}/report.html")).text
    assert text.startswith(f"{run}: {title}")
    assert re.search(said, text)
    assert "Loss: training" in text
    assert "KL" not in text
    assert "ppo.total_episodes" not in text


def test_a_reward_model_does_not_speak_and_a_supervised_run_does(app):
    said = app("generate", "runs/rm", "--prompt", "we", code=2).err
    assert "is a reward model" in said
    assert "--reward reward_model reward.kwargs.model=runs/rm" in said
    assert said.count("Error") == 1
    assert app("generate", "runs/sft", "--prompt", "the film was", code=0).out


@pytest.mark.parametrize(("run", "kind", "how", "tag"), [
    ("sft", "AutoModelForCausalLM", "supervised fine-tuning", "sft"),
    ("rm", "AutoModelForSequenceClassification", "as a reward model on pairs", "reward-model")])
def test_exports_tell_what_was_trained(app, run, kind, how, tag):
    app("export", f"runs/{run}", "-o", "out", code=0)
    card = read("out/README.md")
    assert kind in card
    assert how in card
    assert f"- {tag}\n" in card
    assert "PPO" not in card
    assert "the 0.25 of the data that was held back" in card
    own = read(f"runs/{run}/model/README.md")
    assert how in own
    assert "| data |" in own
    assert "PPO" not in own


def test_an_evaluation_is_that_of_the_training(app, data_runs, monkeypatch):
    for run, names in (("sft", ("loss", "perplexity")), ("rm", ("accuracy", "loss", "ece"))):
        noted = read_json(data_runs / "runs" / run / "env.json")["linear_layers"]
        # a processor for which another choice would be made
        other = "AVX2" if noted != onednn.TORCH else "AVX512"
        monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda other=other: other)
        found = json.loads(app("eval", f"runs/{run}", "--json", code=0).out)["figures"]
        assert {name: found[name] for name in names} == {
            name: row(run)[f"eval/{name}"] for name in names}


def test_other_data_and_other_models(app):
    found = json.loads(app("eval", "runs/sft", "data.path=texts.jsonl", "--against", "base",
                           "--json", code=0).out)
    assert found["samples"] == found["against"]["samples"] == 12
    assert found["figures"]["loss"] < found["against"]["figures"]["loss"]
    bare = ppocli.evaluate("runs/sft/checkpoints/step-000002/policy", ["data.val=texts.jsonl"])
    assert bare.figures["loss"] == found["figures"]["loss"]


@pytest.mark.slow
def test_data_from_python(shared_world):
    given = {"run_name": "given", "hardware.device": "cpu", "sft.num_updates": 1,
             "generation.max_new_tokens": 4}
    words = [f"{key}={value}" for key, value in given.items()]
    run = ppocli.sft(words, model_path=shared_world / "lm", data=[
        {"prompt": "we", "completion": end} for end in (" saw it .", " left .")])
    assert read_config(run.run_dir / "config.yaml").data.path == "<python object>"
    with pytest.raises(PpocliError, match="its folder doesn't hold the data") as error:
        ppocli.evaluate(run.run_dir, ["data.val=0.5"])
    assert "data.val=FILE" in str(error.value)
    with pytest.raises(PpocliError, match="started from Python with data") as error:
        ppocli.train([f"resume={run.run_dir}", "sft.num_updates=2"])
    assert f'ppocli.sft(["resume={run.run_dir}"], data=...)' in str(error.value)
    on = ppocli.sft([f"resume={run.run_dir}", "sft.num_updates=2"],
                    data=[{"prompt": "we", "completion": end} for end in (" saw it .", " left .")])
    assert on.summary["steps"] == 2
