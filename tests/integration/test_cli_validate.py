"""``ppocli validate``: all problems at once, nothing written; and ``--dry-run``, which makes the
run's first step in small."""

import json
import re
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
from helpers import environment, jsonl, ppocli, save_lm
from runs import words

from ppocli.config.text import clean
from ppocli.config.user_code import CodeSetting, refuse_absent
from ppocli.errors import RewardError
from ppocli.rewards.resolve import REWARD


def everything(folder: Path) -> dict[str, int]:
    """All files and folders in it with the time of their last change."""
    return {str(path): path.lstat().st_mtime_ns for path in folder.rglob("*")
            if "__pycache__" not in path.parts}


def test_a_valid_run_is_one_line_and_writes_nothing(validate, world):
    before = everything(world)
    done = validate(*words(), code=0)
    assert done.err.startswith("not looked at: weights")
    assert done.out == (
        "valid: ./lm, reward rewards.py:plain, 8 prompts, 4 steps of 12 samples (48 in all), "
        "device cpu fp32, into runs/run-DATE-TIME\n")
    assert validate(*words("run_name=mine", "output_dir=deep/er")).out.rstrip().endswith(
        "into deep/er/mine")
    assert everything(world) == before


def test_all_problems_are_told_at_once_each_with_place_and_remedy(validate, world):
    (world / "out").write_text("")
    done = validate("model.path=./nope", "prompts.path=prompt.jsonl", "reward.fn=rewards.py:plan",
                    "reward.metric_fn=nowhere:metric", "ppo.num_steps=2", "ppo.vf_coef=-1",
                    "generation.top_pp=1", "output_dir=out", code=2)
    assert done.out == ""
    assert done.err.startswith("Error: 7 problems:\n  generation.top_pp: unknown key; ")
    for problem in (
            "  ppo.vf_coef: -1 must be >= 0\n    where: command line\n"
            "    fix:   ppocli schema ppo.vf_coef tells what it takes\n",
            f"  Folder ./nope does not exist (looked in {world}).\n    where: model.path\n",
            "    where: prompts.path=prompt.jsonl\n    fix:   did you mean prompts.jsonl?\n",
            "  There is no 'plan' in 'rewards.py'. Did you mean 'plain'?\n",
            "    where: reward.metric_fn=nowhere:metric\n",
            f"  out can't be a folder: {world}/out is a file.\n"):
        assert problem in done.err


@pytest.mark.parametrize(("more", "code", "said"), [
    (["model.path=some/model"], 3, "HF_HUB_OFFLINE=1 forbids downloading"),
    (["reward.fn=column.py:score"], 7, "genre"),
    (["output_dir=/proc/nowhere"], 6, "/proc/nowhere can't be written"),
    (["run_name=lm", "output_dir=."], 5, "lm exists already and isn't empty")])
def test_exit_codes(more, code, said, validate, world):
    (world / "column.py").write_text("def score(samples, genre):\n    return []\n")
    assert said in validate(*words(*more), code=code).err


@pytest.mark.parametrize(("more", "code", "said"), [
    (["generation.stop_token_ids=[99999]"], 2, "Token 99999 would never end a response"),
    (["prompts.chat=true"], 3, "chat template"),
    (["model.value.kind=model", "model.value.path=short"], 3, "short has 8 positions")])
def test_what_does_not_fit_the_model_is_refused_before_the_first_step(more, code, said, command,
                                                                      world):
    save_lm(world / "short", n_positions=8)
    assert said in command(*words(*more), code=code).err
    assert not (world / "runs").exists()


def test_a_reward_of_ones_own_after_a_recipe_is_told_the_words_that_work(validate, world):
    (world / "own.py").write_text("def score(outputs):\n    return [0.0] * len(outputs)\n")
    done = validate("+recipe=quickstart", "reward.fn=own:score", code=7)
    assert "has no argument 'model'" in done.err
    told = done.err.strip().rpartition("take the recipe's reward out: ")[2].split()
    assert told == ["reward=null", "reward.fn=own:score"]
    assert "reward own:score" in validate("+recipe=quickstart", *told, code=0).out


def test_every_reward_of_several_is_checked(validate, world):
    done = validate(*words("reward.fn=null", "reward.fns.a.fn=rewards.py:nope",
                           "reward.fns.b.fn=gone.py:score", "reward.fns.c.fn=length",
                           "reward.fns.d.fn=rewards.py:plain"), code=7)
    assert "Error: 3 problems:" in done.err
    for part in ("reward.fns.a.fn", "reward.fns.b.fn", "reward.fns.c"):
        assert part in done.err
    assert "reward.fns.d" not in done.err


def test_resuming_is_compared_with_the_run(validate, finished):
    before = everything(finished)
    assert validate("resume=runs/mine", "ppo.num_steps=9").out.endswith(f"into {finished}\n")
    assert "seed: 0 -> 8" in validate("resume=runs/mine", "seed=8", code=5).err
    (finished / "checkpoints").rename("elsewhere")
    assert "has no valid checkpoint to go on from" in validate("resume=runs/mine", code=5).err
    Path("elsewhere").rename(finished / "checkpoints")
    assert everything(finished) == before


def test_a_sweep_is_refused(validate):
    assert "leave out -m" in validate("-m", *words("seed=1,2"), code=2).err


def test_json_holds_the_same(validate, world):
    good = json.loads(validate(*words(), "--json").out)
    assert (good["valid"], good["exit_code"], good["problems"]) == (True, 0, [])
    assert good["run"]["samples"] == 48
    bad = json.loads(validate(*words("ppo.gamma=2", "model.path=./nope"), "--json", code=2).out)
    assert (bad["valid"], bad["exit_code"], bad["run"]) == (False, 2, None)
    assert [problem["exit_code"] for problem in bad["problems"]] == [2, 3]
    assert bad["problems"][1]["where"] == "model.path"
    assert all(problem["fix"] for problem in bad["problems"])


# A dry run ----------------------------------------------------------------------------------------

@pytest.fixture
def dry_run(app):
    return partial(app, "train", "--dry-run")


def test_it_draws_the_runs_own_first_samples_and_keeps_nothing(reference, shared_world):
    """The reference run logged its rollouts: step 1 begins with the very samples shown here."""
    logged = [row for row in jsonl(reference / "samples.jsonl") if row["kind"] == "rollout"][:2]
    before = sorted(path.name for path in shared_world.iterdir())
    lines = ppocli("train", "--dry-run", *words("run_name=new", stateful=True), cwd=shared_world,
                   code=0).stdout.splitlines()
    assert [line for line in lines if " → " in line] == [
        f"  {clean(row['prompt'])} → {clean(row['response'])}" for row in logged]
    assert f"metric words: {', '.join(str(len(s['response'].split())) for s in logged)}" in lines
    assert re.fullmatch(r"loaded: [\d,]+ parameters, [\d,]+ trained, 8 prompts, on cpu fp32",
                        lines[1])
    assert lines[-2].count(".") == 6  # load, rollout, reward, scoring, metric, optimize
    assert sorted(path.name for path in shared_world.iterdir()) == before


def odd(world: Path, body: str) -> None:
    """A reward of one line, odd.py:score."""
    (world / "odd.py").write_text(f"def score(samples, **columns):\n    {body}\n")


def test_its_words(dry_run, world):
    (world / "odd.py").write_text("def score(completions, trainer_state, **columns):\n"
                                  "    return [6 / trainer_state.max_steps for _ in completions]\n")
    done = dry_run(*words("reward.fn=odd.py:score", "prompts.template='\x1b[31m{prompt}'"), code=0)
    lines = done.out.splitlines()
    assert lines[0].startswith("valid: ./lm")
    assert "first prompt as the model gets it" in lines[2]
    assert sum(line.startswith("sample ") for line in lines) == 2
    assert "score 1.5, kl 0.0000" in done.out
    assert "nats per token, as it must be before training" in done.out
    assert "\x1b" not in done.out
    assert f"running code from {world}/odd.py" in done.err
    assert [line.split(":")[0] for line in lines[-4:]] == ["note", "note", "seconds", "peak memory"]
    assert lines[-5].startswith("gradient of the first 2 (")


def test_a_reference_that_disagrees_is_pointed_out(dry_run, world, monkeypatch):
    from ppocli.launch import preflight

    monkeypatch.setitem(preflight.KL_TOLERANCE, "fp32", 1e-9)  # what bf16 rounds off is small here
    assert "WRONG: before training it must be 0; do model.dtype" in dry_run(
        *words("model.dtype=bf16")).out


def test_notes_on_what_nothing_can_be_learnt_from(dry_run, world):
    odd(world, "return [1.0] * len(samples)\n\n"
        "def none(samples):\n    return [None] * len(samples)")
    out = dry_run(*words("reward.fn=odd.py:score"), code=0).out
    notes = [line for line in out.splitlines() if line.startswith("note: ")]
    assert "the scores of all 2 samples are equal (1)" in notes[0]
    assert "the gradient is 0, so that an" in notes[1]
    out = dry_run(*words("reward.fn=odd.py:none", "reward.on_invalid=skip"), code=0).out
    assert "sample 1: score none" in out
    assert "gradient: not tried, no sample has a score" in out
    assert "note: the gradient" not in dry_run(*words(), code=0).out


def test_it_ends_as_the_run_would(dry_run, world):
    odd(world, "raise RuntimeError('bad day')")
    assert "bad day" in dry_run(*words("reward.fn=odd.py:score"), code=7).err


MISSPELT = [
    ("reward.fn=rewards.py:scor", 7, "Did you mean 'score'?"),
    ("env.fn=guess_nmber", 7, "Did you mean 'guess_number'?"),
    ("rollout.engine=rewards:Sampler", 2, "There is no 'Sampler' in 'rewards.py'"),
    ("prompts.column=text", 3, "fix:   prompts.column=prompt")]


def test_training_finds_what_is_misspelled_before_torch_loads(world):
    script = ("import sys\nfrom ppocli.cli.app import app\nfrom ppocli.cli.output import code_of\n"
              f"for given in {[words(word) for word, _, _ in MISSPELT]!r}:\n"
              "    print(code_of(lambda: app(['train', *given], prog_name='ppocli')),\n"
              "          {'torch', 'transformers'} & set(sys.modules))\n"
              "    print('END', file=sys.stderr)")
    done = subprocess.run([sys.executable, "-c", script], cwd=world, text=True, timeout=60,
                          capture_output=True, env=environment(), check=True)
    told = done.stderr.split("END\n")
    assert done.stdout.splitlines() == [f"{code} set()" for _, code, _ in MISSPELT]
    for text, (word, _, said) in zip(told, MISSPELT, strict=False):
        assert said in text, (word, text)
    assert not (world / "runs").exists()


def test_what_a_module_makes_of_itself_is_asked_when_it_runs(world):
    for name, body in {"star": "from rewards import *", "late": "globals()['score'] = len",
                       "lazy": "def __getattr__(name): ..."}.items():
        (world / f"{name}.py").write_text(body + "\n")
        refuse_absent(CodeSetting(f"{name}.py:score", "reward.fn", REWARD))
    (world / "other.py").write_text("other = 1\n")
    with pytest.raises(RewardError, match=r"There is no 'score' in 'other\.py'"):
        refuse_absent(CodeSetting("other:score", "reward.fn", REWARD))


def test_typed_prompts_take_the_place_of_a_groups(validate, world):
    (world / "three.txt").write_text("a\nb\nc\n")
    for more, count in ((["prompts.items=[a,b]"], 2), (["prompts.path=three.txt"], 3)):
        done = validate("+recipe=quickstart", *more, "--json")
        assert json.loads(done.out)["run"]["rows"] == count, done.said
