"""What a stranger's run, sweep or recipe may do: nothing but be read, until someone says more.

A folder that was downloaded is data. Each test is an attack through one of its files, with the
command that a person would give next; ``docs/security.md`` says what is held.
"""

import json
import logging
import shutil
import stat
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml
from helpers import checked, read_json
from runs import PLANTED, signed_again

from ppocli.config import config_yaml, import_guard
from ppocli.errors import CheckpointError, RewardError
from ppocli.launch.local_ranks import Start
from ppocli.launch.target_config import allow_code
from ppocli.rewards.resolve import locate_reward
from ppocli.runs import atomic, record, run_folder, sweeps, trust

EVIL = """\
from pathlib import Path

Path({mark!r}).write_text("ran")


def score(outputs, **columns):
    return [1.0] * len(outputs)


def measure(outputs, **columns):
    return {{}}
"""


def slow(case: str) -> object:
    return pytest.param(case, marks=pytest.mark.slow)


def rewrite(run: Path, change: Callable[[dict], object]) -> None:
    config = yaml.safe_load((run / "config.yaml").read_text())
    change(config)
    (run / "config.yaml").write_text(text := yaml.safe_dump(config))
    told = read_json(run / "run.json")
    (run / "run.json").write_text(json.dumps({**told, "config": text}))


@pytest.fixture
def mark(here: Path) -> Path:
    """What the stranger's code leaves behind where it is run."""
    return here / "ran"


@pytest.fixture
def stranger(finished: Path, here: Path, mark: Path) -> Path:
    """A run that somebody else has made, with code of theirs in its folder."""
    run = here / "dl/run"
    run.parent.mkdir()
    finished.rename(run)
    (run / "evil.py").write_text(EVIL.format(mark=str(mark)))
    rewrite(run, lambda config: config["reward"].update(
        fn="dl/run/evil.py:score", metric_fn="dl/run/evil.py:measure"))
    return run


# Code ---------------------------------------------------------------------------------------------

@pytest.mark.parametrize("given", [
    "eval dl/run", "resume dl/run ppo.num_steps=9", *map(slow, (
        "generate dl/run -p it --score", "serve-reward resume=dl/run --port 0",
        "validate resume=dl/run"))])
def test_a_strangers_run_runs_nothing_that_it_names(given, stranger, app, mark):
    done = app(*given.split(), code=5)
    assert not mark.exists()
    assert "dl/run is not signed with your key" in done.err
    assert "reward.fn: dl/run/evil.py:score" in done.err
    assert "add --trust" in done.err
    assert str(trust.key_path()) in done.err


@pytest.mark.parametrize("given", ["report dl/run", "generate dl/run -p it"])
def test_what_needs_no_code_goes_on_without(given, stranger, app, mark):
    app(*given.split(), code=0)
    assert not mark.exists()


@pytest.mark.parametrize("given", [
    "export dl/run", *map(slow, (
        "eval dl/run --reward length reward.kwargs.target=3 reward.metric_fn=null",
        "resume dl/run reward.fn=length reward.metric_fn=null"))])
def test_a_models_own_code_needs_trust_as_well(given, stranger, app):
    rewrite(stranger, lambda config: config["model"].update(trust_remote_code=True))
    done = app(*given.split(), code=5)
    assert "model.trust_remote_code: Python files that come with the model" in done.err


def test_arguments_that_let_a_built_in_run_a_models_code(stranger, app):
    rewrite(stranger, lambda config: config["reward"].update(
        fn="reward_model", metric_fn=None, kwargs={"model": "x/y", "trust_remote_code": True}))
    assert "reward.kwargs.trust_remote_code" in app("eval", "dl/run", code=5).err


def test_every_key_that_names_code_is_asked_about(stranger, app, mark):
    code = "dl/run/evil.py:score"
    rewrite(stranger, lambda config: (
        config["reward"].update(fn="length", metric_fn=None, kwargs={"target": 3}),
        config["task"].update(fn=code), config["rollout"].update(engine=code),
        config["tracking"].update(trackers=[code])))
    err = app("resume", "dl/run", "ppo.num_steps=9", code=5).err
    assert [key for key in ("task.", "rollout.", "tracking.") if key not in err] == []
    assert not mark.exists()


@pytest.mark.slow
def test_trust_runs_it_and_going_on_makes_the_run_mine(stranger, app, mark):
    app("eval", "dl/run", "--trust", "--limit", "1", code=0)
    assert mark.exists()
    app("resume", "dl/run", "--trust", "ppo.num_steps=5", code=0)
    assert trust.is_own_run(stranger)
    app("eval", "dl/run", "--limit", "1", "--name", "mine", code=0)
    rewrite(stranger, lambda config: config["reward"].update(timeout=1))
    assert "not signed" in app("eval", "dl/run", code=5).err


def test_my_own_run_needs_nothing_wherever_it_lies(finished, here):
    elsewhere = finished.rename(here / "moved")
    assert trust.is_own_run(elsewhere)
    (here / "link").symlink_to(elsewhere)
    assert trust.is_own_run(here / "link")


@pytest.mark.parametrize("forged", ["other run", "other key", "digest"])
def test_a_signature_can_be_neither_moved_nor_made(forged, finished, here, monkeypatch):
    told = read_json(finished / "run.json")
    if forged == "other run":
        told["run_id"] = "0" * 16
    elif forged == "digest":
        told["signed"] = [atomic.sha256_file(finished / "config.yaml")]
    else:
        monkeypatch.setenv("PPOCLI_KEY_FILE", str(here / "keys/other"))
        trust.own_key()
    (finished / "run.json").write_text(json.dumps(told))
    assert not trust.is_own_run(finished)


def test_settings_are_signed_before_they_take_their_place(finished, monkeypatch):
    """A kill between the two leaves a run whose every configuration is its owner's."""
    rewritten = replace(config_yaml.read_config(finished / "config.yaml"), seed=5)
    run_folder.write_config(rewritten, finished / config_yaml.NEXT_CONFIG_FILE)
    monkeypatch.setattr(config_yaml, "accept_config", lambda run_dir: None)
    record.accept_settings(finished, 2)
    assert trust.is_own_run(finished)
    (finished / config_yaml.NEXT_CONFIG_FILE).rename(finished / "config.yaml")
    assert trust.is_own_run(finished)


def test_a_key_is_made_once_and_for_its_owner_alone(here, monkeypatch):
    monkeypatch.delenv("PPOCLI_KEY_FILE")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(here / "xdg"))
    key = trust.own_key()
    path = here / "xdg/ppocli/key"
    assert (len(key), trust.own_key(), path.read_bytes()) == (32, key, key)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert [file.name for file in path.parent.iterdir()] == ["key"]


@pytest.mark.parametrize("place", ["file/key", "short"])
def test_without_a_place_for_a_key_a_run_goes_on_and_says_so_once(place, here, monkeypatch, caplog):
    (here / "file").write_text("no folder")
    (here / "short").write_text("no key")
    monkeypatch.setenv("PPOCLI_KEY_FILE", str(here / place))
    trust._warn_once.cache_clear()
    with caplog.at_level(logging.WARNING, "ppocli"):
        told = [trust.signed({"run_id": "x"}, "x", "y") for _ in range(2)]
    assert told == [{"run_id": "x"}] * 2
    [warning] = caplog.records
    assert str(here / place) in warning.getMessage()
    assert "PPOCLI_KEY_FILE" in warning.getMessage()
    assert not trust.is_signed(told[0], "x", "y")


def test_a_strangers_sweep_is_a_command_line(here, app):
    swept = ("+recipe=quickstart", "reward.fn=dl/evil.py:score", "seed=1,2")
    (here / "dl").mkdir()
    mine = sweeps.SweepRecord(here / "dl", ("-m", *swept), str(here), (("seed=1",),))
    sweeps.write_sweep(mine)
    sweeps.check_own(mine, trusts=False)
    with pytest.raises(CheckpointError, match="not signed"):
        sweeps.check_own(replace(mine, jobs=(("reward.fn=evil.py:score",),)), trusts=False)
    told = read_json(here / "dl/sweep.json")
    (here / "dl/sweep.json").write_text(json.dumps({**told, "words": ["-m", *swept, "seed=3"]}))
    done = app("sweep", "resume", "dl", code=5)
    assert "runs its command: ppocli train -m +recipe=quickstart" in done.err


# Import paths -------------------------------------------------------------------------------------

@pytest.fixture
def recipes(here: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Writes ``recipes/mine.yaml`` whose reward is what it is given."""
    monkeypatch.delitem(sys.modules, "mine", raising=False)
    (here / "mine").mkdir()
    (here / "mine/__init__.py").write_text(
        "import numpy as np\nfrom numpy import load\n\n\ndef score(outputs):\n    return [0.0]\n")
    installed = here / ".venv/lib/python3/site-packages"
    installed.mkdir(parents=True)
    shutil.copy(here / "mine/__init__.py", installed / "other.py")
    (here / "linked").symlink_to(installed)
    (here.parent / "outside.py").write_text("def score(outputs):\n    return [0.0]\n")
    (here / "recipes").mkdir()

    def write(path: str) -> None:
        (here / "recipes/mine.yaml").write_text(yaml.safe_dump(
            {"model": {"path": "builtin:reviews"}, "ppo": {"num_steps": 1},
             "reward": {"fn": path}}))
    return write


def located(*given: str) -> str:
    """Where the reward of these words leads, as a run would follow it."""
    found = checked(*given)
    allow_code(found)
    config = config_yaml.with_absolute_paths(found.config)
    return locate_reward(str(config.reward.fn), key="reward.fn").spec


@pytest.mark.parametrize("path", [
    "numpy:load", "mine:np.load", "linked/other.py:score", "../outside.py:score",
    "ppocli.config.user_code:locate"])
def test_a_recipe_leads_to_nothing_but_code_that_is_meant_for_it(path, recipes):
    recipes(path)
    with pytest.raises(RewardError, match="a configuration file names it") as refused:
        located("+recipe=mine")
    assert "type it: reward.fn=" in str(refused.value)
    located("+recipe=mine", f"reward.fn={path}")


@pytest.mark.parametrize("path", ["mine:score", "mine/__init__.py:score",
                                  "ppocli.rewards.rules:Length"])
def test_a_recipe_may_name_the_users_own_code_and_ours(path, recipes):
    recipes(path)
    located("+recipe=mine")


def test_a_package_may_offer_its_rewards(recipes, monkeypatch):
    recipes("numpy:load")
    offered = [SimpleNamespace(module="numpy.anything")]
    monkeypatch.setattr(import_guard.metadata, "entry_points",
                        lambda group: offered if group == "ppocli.rewards" else [])
    import_guard._offering.cache_clear()
    try:
        located("+recipe=mine")
    finally:
        import_guard._offering.cache_clear()


def test_further_processes_are_told_what_a_recipe_names(recipes, here):
    recipes("mine:np.load")
    composed = checked("+recipe=mine")
    run_folder.write_config(composed.config, here / "config.yaml")
    start = Start(here, composed.config, limited=allow_code(composed))
    import_guard.limit(())
    import_guard.limit(Start.read(start.argv()).limited)
    with pytest.raises(RewardError, match="a configuration file names it"):
        locate_reward("mine:np.load", key="reward.fn")
    import_guard.limit(())


# Interpolations -----------------------------------------------------------------------------------

@pytest.mark.parametrize("given", ["eval runs/mine", slow("report runs/mine")])
def test_a_runs_configuration_reads_nothing_of_mine(given, finished, app, monkeypatch, here):
    monkeypatch.setenv("HF_TOKEN", PLANTED)
    rewrite(finished, lambda config: config["prompts"].update(template="${oc.env:HF_TOKEN} it"))
    signed_again(finished)
    done = app(*given.split(), code=5)
    assert "is an interpolation, and a run's configuration holds plain values only" in done.err
    assert PLANTED not in done.said
    assert not [path for path in here.rglob("*") if path.is_file()
                and PLANTED.encode() in path.read_bytes()]


# Links --------------------------------------------------------------------------------------------

@pytest.mark.parametrize("name", [
    ".lock", "checkpoints", *map(slow, (
        "events/x", "metrics.jsonl", "checkpoints/step-000004", "summary.json"))])
def test_nothing_is_written_through_a_link(name, finished, app, here):
    outside = here / "outside"
    outside.mkdir()
    (outside / "mine").write_text("kept")
    aside, path = outside / "there", finished / name
    if path.exists():
        path.rename(aside)
    else:
        aside.write_text("kept")
    path.parent.mkdir(exist_ok=True)
    path.symlink_to(aside)
    before = {file: file.read_bytes() for file in outside.rglob("*") if file.is_file()}
    done = app("resume", "runs/mine", "ppo.num_steps=5", code=5)
    assert f"{name} is a link" in done.err
    assert "changed on resume" not in done.err
    assert before == {file: file.read_bytes() for file in outside.rglob("*") if file.is_file()}
    assert path.is_symlink()


def test_results_do_not_leave_the_run_either(finished, app, here):
    (here / "outside").mkdir()
    (finished / "export").symlink_to(here / "outside")
    assert "is a link" in app("export", "runs/mine", code=5).err
    assert list((here / "outside").iterdir()) == []


def test_locks_and_rows_are_opened_without_following(here):
    from ppocli.errors import DiskError
    from ppocli.runs.run_logs import JsonlWriter

    (here / "mine").write_text("kept")
    for name, use in ((".lock", lambda: run_folder.lock(here).__enter__()),
                      ("rows", lambda: JsonlWriter(here / "rows"))):
        (here / name).symlink_to(here / "mine")
        with pytest.raises(DiskError, match="Won't follow a link"):
            use()
    assert (here / "mine").read_text() == "kept"
