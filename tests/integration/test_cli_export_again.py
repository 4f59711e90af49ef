"""``ppocli export`` beside others: evaluations, other exports, the folder of an earlier one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml
from helpers import save_lm
from runs import STEPS, spawn, wait_for

import ppocli
from ppocli.errors import ConfigError
from ppocli.export.card import user_text, with_user_text
from ppocli.export.facts import split_card

LAST = f"step-{STEPS:06d}"


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


OTHER = [{"reward": "length", "overrides": ["reward.kwargs.target=8"]}, {"limit": 2}, {"step": 2},
         {"overrides": ["generation.temperature=0.5"]},
         {"overrides": ["generation.stop_token_ids=[5]"]}]


@pytest.mark.parametrize("asked", OTHER)
def test_an_evaluation_of_something_else_is_not_the_cards(finished, export, asked):
    ppocli.evaluate(finished, name="zz", **asked)
    assert export("mine").code == 0
    folder = finished / "export" / LAST
    assert not (folder / "eval.json").exists()
    assert "separate evaluation" not in (folder / "README.md").read_text()


def test_an_evaluation_of_other_weights_is_not_the_cards(finished, export):
    found = ppocli.evaluate(finished, name="zz").folder / "eval.json"
    told = json.loads(found.read_text())
    told["model"]["digest"] = "0" * 64
    found.write_text(json.dumps(told))
    assert export("mine").code == 0
    assert "eval.json" not in names(finished / "export" / LAST)


def test_the_own_evaluation_comes_along_without_folders(finished, export, here):
    done = ppocli.evaluate(finished, name="zz", num_samples=3, seed=7)
    assert export("mine").code == 0
    folder = finished / "export" / LAST
    told = json.loads((folder / "eval.json").read_text())
    assert told["figures"] == done.figures
    assert (told["run"], told["model"]["path"], told["settings"]["targets"]) == (
        "mine", "model", ["model"])
    assert (told["settings"]["reward"]["fn"], list(told["settings"]["code"])) == (
        "rewards.py:score", ["rewards.py"])
    for place in (here, here.resolve(), finished, Path(finished / "config.yaml")):
        assert str(place) not in (folder / "eval.json").read_text()


def test_a_second_export_to_the_same_place_is_told_who_works_there(finished, export, here):
    first = spawn("export", "mine", cwd=here, PPOCLI_FAULTS="export.before_verify:sleep=4")
    wait_for(lambda: any((finished / "export").glob(".staging-*/README.md")), first)
    second = export("mine", code=5)
    out, err = first.communicate(timeout=60)
    assert (f"Error: {finished}/export/{LAST} is in use by process {first.pid} on "
            in second.err), second.err
    assert second.err.endswith(
        "fix:   wait for it to end or stop it, or name another folder: --output DIR\n")
    assert (first.returncode, out) == (0, f"{finished}/export/{LAST}\n"), err
    assert names(finished / "export") == {LAST}


def test_what_another_export_has_written_meanwhile_is_not_replaced_unasked(finished, export):
    from ppocli.cli.export import _write
    from ppocli.config.resolved import training_command
    from ppocli.export.facts import Mask
    from ppocli.export.request import ExportRequest, resolve

    request = ExportRequest("mine")
    plan = resolve(request, print, training_command)
    assert export("mine").code == 0
    with pytest.raises(ConfigError, match="holds an export already"):
        _write(plan, request, Mask({}), print)


def test_the_advice_to_push_names_the_same_destination(finished, export):
    assert export("mine").code == 0
    again = export("mine", "--to-hub", "--repo-id", "me/x", "--public", "--revision", "b1", code=2)
    assert again.err.endswith(
        f"to push the one that is there: ppocli export runs/mine/export/{LAST} --to-hub "
        "--repo-id me/x --public --revision b1\n")


def test_an_export_is_not_pushed_with_a_wish_unheard(here, export):
    save_lm(here / "lm")
    assert export("./lm", "-o", "out").code == 0
    refused = export("./out", "--to-hub", "--max-shard-size", "20KB")
    assert (refused.code, refused.err.splitlines()[-1]) == (
        2, "  fix:   --output DIR; or push it as it is: leave out --max-shard-size")
    assert names(here / "out").isdisjoint({"model.safetensors.index.json"})


def test_an_export_of_an_export_tells_what_the_first_told(finished, export, here):
    ppocli.evaluate(finished, name="zz")
    assert export("mine", "--include-value-head", "-o", "one").code == 0
    card = here / "one/README.md"
    card.write_text(with_user_text(card.read_text(), "Use *with care*.").replace(
        "---\n", "---\nlicense: mit\n", 1))
    assert export("./one", "--dtype", "bf16", "--max-shard-size", "20KB", "-o", "two").code == 0
    old, new = ((here / place / "README.md").read_text() for place in ("one", "two"))
    assert split_card(new)[0] == split_card(old)[0]
    assert split_card(new)[0]["license"] == "mit"
    assert new == old.replace('name = "one"', 'name = "two"').replace(
        "stored as fp32", "stored as bf16")
    for name in ("training_config.yaml", "curve.svg", "eval.json", "value_head.safetensors"):
        assert (here / "two" / name).read_bytes() == (here / "one" / name).read_bytes(), name
    first, second = (json.loads((here / place / "export.json").read_text())
                     for place in ("one", "two"))
    for name in ("source", "run", "step", "evaluation", "run_id", "versions"):
        assert second[name] == first[name], name
    assert second["dtype"] == "bf16"
    assert second["files"].keys() >= {"training_config.yaml", "eval.json"}
    # what is written on the card that is replaced counts more
    replaced = here / "two/README.md"
    replaced.write_text(with_user_text(new, "Mine.").replace("---\n", "---\nlanguage: en\n", 1))
    assert export("./one", "-o", "two", "--overwrite").code == 0
    again = replaced.read_text()
    assert user_text(again) == "Mine."
    assert split_card(again)[0] == split_card(old)[0] | {"language": "en"}


def test_an_export_with_other_weights_tells_nothing_of_its_training(finished, export, here):
    assert export("mine", "-o", "one").code == 0
    config = json.loads((here / "one/config.json").read_text())
    (here / "one/config.json").write_text(json.dumps(config | {"mine": 1}))
    done = export("./one", "-o", "two", code=0)
    assert "config.json in " in done.err
    assert "What it tells of its training is left behind." in done.err
    assert "## Training" not in (here / "two/README.md").read_text()


def test_a_card_without_a_kl_explains_none(finished, export):
    config = yaml.safe_load((finished / "config.yaml").read_text())
    config["model"]["reference"]["kind"] = "none"
    (finished / "config.yaml").write_text(yaml.safe_dump(config))
    rows = [json.loads(line) for line in (finished / "metrics.jsonl").read_text().splitlines()]
    (finished / "metrics.jsonl").write_text("".join(
        json.dumps(row | {"eval/kl_mean": None}) + "\n" for row in rows))
    assert export("mine").code == 0
    card = (finished / "export" / LAST / "README.md").read_text()
    assert "| `reward_mean` |" in card
    assert "kl_mean" not in card
