"""Environments (``env.fn``) by the command: training, kill and resume, evaluation, refusals."""

import shutil
from pathlib import Path

import played
import pytest
from helpers import jsonl, read_json
from runs import assert_equal_runs, copied, make_world, resumed, rewrite, run, whole_copy, words

from ppocli import PPOTrainer
from ppocli.errors import ConfigError
from ppocli.runs.episode import in_a_table

PLAYS = ("env.fn=env.py:Words", "env.max_turns=3", "env.max_tokens=24",
         "generation.max_new_tokens=5", "ppo.gae_unit=turn", "ppo.kl_controller=adaptive",
         "ppo.target=0.5", "ppo.horizon=50", "reward.scale=running", "tracking.log_rollouts=true",
         "ppo.num_steps=2")
RUN = "runs/plays"
STEP = "step-000002"


def playing(*more: str) -> list[str]:
    """The command line of a short run in which the environment's rewards are the only ones."""
    given = {word.partition("=")[0] for word in more}
    return [word for word in words(*PLAYS, *more)
            if not word.startswith("reward.fn=") or "reward.fn" in given]


def last_of(run_dir: Path) -> list[dict]:
    """The samples of the last evaluation."""
    return [row for row in jsonl(run_dir / "samples.jsonl")
            if row["kind"] == "eval" and row["step"] == 2]


def with_environments(folder: Path) -> Path:
    shutil.copy(played.__file__, folder / "env.py")
    return folder


@pytest.fixture(scope="module")
def plays(tmp_path_factory) -> Path:
    """A finished run, made by the command."""
    world = with_environments(make_world(tmp_path_factory.mktemp("world")))
    run("train", *playing("run_name=plays"), cwd=world, code=0)
    return world / RUN


@pytest.fixture
def stage(world) -> Path:
    """The current folder, with environments in it."""
    return with_environments(world)


@pytest.fixture
def place(plays, stage) -> Path:
    """The same with a copy of the run."""
    (stage / "runs").mkdir()
    rewrite(whole_copy(plays, stage / RUN), {str(plays.parents[1]): str(stage)})
    return stage


# Training -----------------------------------------------------------------------------------------

def test_a_run_has_turns_in_its_samples_and_figures_of_its_episodes(plays):
    rows = jsonl(plays / "samples.jsonl")
    rollouts = [row for row in rows if row["kind"] == "rollout"]
    assert [row["episode"] for row in rollouts] == list(range(24))
    for row in rows:
        assert row["ended"] in ("done", "turns", "tokens")
        assert 1 <= len(row["turns"]) <= 3
        assert row["score"] == pytest.approx(sum(turn["reward"] for turn in row["turns"]))
        assert row["response"] == row.get("opening", "") + "".join(
            turn["response"] + turn["observation"] for turn in row["turns"])
    assert len({len(row["turns"]) for row in rows}) == 3
    figures = jsonl(plays / "metrics.jsonl")
    for step in (1, 2):
        own, row = rollouts[12 * (step - 1):12 * step], figures[step]
        assert row["env/turns_mean"] == sum(len(one["turns"]) for one in own) / 12
        assert row["env/done_share"] == sum(one["ended"] == "done" for one in own) / 12
        assert row["env/truncated_share"] == pytest.approx(1 - row["env/done_share"])
        assert row["env/errors"] == row["env/tool_errors"] == 0
    after = read_json(plays / "summary.json")["eval_after"]
    last = last_of(plays)
    assert after["turns_mean"] == sum(len(one["turns"]) for one in last) / len(last)


def test_resuming_at_a_step_equals_the_straight_run(plays, tmp_path):
    stopped = copied(plays, tmp_path / "run", 1)
    resumed(stopped)
    assert_equal_runs(plays, stopped)


@pytest.mark.slow
def test_kill9_and_resume_give_the_same_run(plays, stage, command):
    run("train", *playing("run_name=plays"), cwd=stage, code=-9,
        PPOCLI_FAULTS="optimize.minibatch@5:kill9")
    command(*playing("run_name=plays", "resume=auto"), code=0)
    assert_equal_runs(plays, stage / RUN)


@pytest.mark.slow
@pytest.mark.parametrize("more", [
    ["env.fn=env.py:Slow", "reward.fn=rewards.py:score"],
    ["env.workers=4", "ppo.advantage=grpo", "ppo.n=2", "ppo.gae_unit=token",
     "env.fn=env.py:Failing", "env.on_error=truncate"]])
def test_other_kinds_resume_exactly(more, stage, command):
    command(*playing("run_name=straight", *more), code=0)
    resumed(copied(stage / "runs/straight", stage / "runs/stopped", 1))
    assert_equal_runs(stage / "runs/straight", stage / "runs/stopped")


# What is refused ----------------------------------------------------------------------------------

WRONG = [
    (["env.fn=env.py:Gone"], 7, "There is no 'Gone' in 'env.py'"),
    (["env.fn=env.py:Needy"], 7, "reset asks for 'secret', which nothing provides"),
    (["env.fn=tools"], 2, "env.fn=tools plays these functions, and there are none"),
    (["ppo.gae_unit=turn"], 2, "ppo.gae_unit, env.fn: needs env.fn")]


@pytest.mark.parametrize(("given", "code", "said"), WRONG)
def test_train_and_validate_refuse_the_same_before_a_model_loads(given, code, said, stage, app,
                                                                monkeypatch):
    from ppocli.models.loading import language_model

    monkeypatch.setattr(language_model, "load_lm", None)
    for name in ("validate", "train")[:1 + ("Needy" in given[0])]:
        room = ["env.max_tokens=24"] if given[0].startswith("env.fn") else []
        ended = app(name, *words(*room, *given), code=code)
        assert said in ended.err, (name, ended.err)
        assert not (stage / "runs").exists()


def test_what_the_environment_does_in_its_rehearsal_ends_the_run(stage, command):
    (stage / "env.py").write_text("class Rude:\n    def reset(self, prompt):\n        pass\n\n"
                                  "    def step(self, response):\n        return 'no'\n")
    ended = command(*playing("env.fn=env.py:Rude"), code=7)
    assert "failed in step, turn 1, of episode 0: TypeError: step returned \"'no'\"" in ended.err
    assert "where: env.fn" in ended.err


def test_a_loop_of_ones_own_has_no_environment(stage):
    with pytest.raises(ConfigError, match="each sample of your own loop is one response"):
        PPOTrainer([word for word in playing() if "log_rollouts" not in word])


# Evaluation ---------------------------------------------------------------------------------------

def test_eval_plays_the_same_episodes_as_the_run(place, app):
    app("eval", RUN, code=0)
    figures = read_json(place / RUN / "eval" / STEP / "eval.json")["figures"]
    own = read_json(place / RUN / "summary.json")["eval_after"]
    assert {"turns_mean", "done_share"} < own.keys()
    assert {name: figures[name] for name in own} == own
    kept = jsonl(place / RUN / "eval" / STEP / "samples.jsonl")
    assert [row["turns"] for row in kept] == [row["turns"] for row in last_of(place / RUN)]


# Transcripts --------------------------------------------------------------------------------------

def test_an_environment_is_no_reward_function(place, app):
    assert "There is no reward function: an environment gives" in app(
        "generate", RUN, "-p", "it", "--score", code=2).err


def test_every_view_tells_the_words_apart(place, app):
    row = next(row for row in last_of(place / RUN) if row["turns"][0]["observation"])
    first = row["turns"][0]
    heard = f"[{first['reward']:+g}] {first['observation'].strip()}"
    app("report", RUN, code=0)
    page = (place / RUN / "report.html").read_text()
    assert f'<span class="said heard" dir="auto">{heard}</span>' in page
    assert f'<span class="said" dir="auto">{first["response"].strip()}</span>' in page


def test_tables_of_trackers_have_one_kind_of_rows(plays):
    rows = [in_a_table(row) for row in jsonl(plays / "samples.jsonl") if row["kind"] == "eval"]
    assert len({tuple(row) for row in rows}) == 1
    assert all(isinstance(row["turns"], str) for row in rows)
