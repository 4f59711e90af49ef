"""Jobs of a sweep beside one another, by Hydra's launcher plugins."""

import os
import re
import select
import signal
from pathlib import Path

import pytest
import slurm_double
from helpers import jsonl
from runs import run, spawn, wait_for, words

from ppocli.cli.job import start
from ppocli.config.command_words import read_words
from ppocli.config.compose import compose
from ppocli.config.hydra_sweep import read_plan
from ppocli.runs.run_folder import live_owner
from ppocli.runs.sweeps import jobs_now, read_sweep

IN = "hydra.sweep.dir=runs/s"
JOBLIB = ("hydra/launcher=joblib", "hydra.launcher.n_jobs=2")
SUBMITIT = ("hydra/launcher=submitit_local", "hydra.sweeper.max_batch_size=2")
SLURM = ("hydra/launcher=submitit_slurm", "hydra.launcher.timeout_min=30")


def statuses(world: Path, sweep: str = "s") -> list[str]:
    return [job.status for job in jobs_now(read_sweep(world / "runs" / sweep))]


def both_saved(world: Path) -> bool:
    return all((world / f"runs/s/{n}/checkpoints/step-000001").exists() for n in (0, 1))


def assert_same_weights(world: Path, *numbers: int) -> None:
    """Jobs of ``runs/s`` have the weights of those of ``runs/turn``."""
    for number in numbers:
        one, other = (world / f"runs/{sweep}/{number}/model/model.safetensors"
                      for sweep in ("s", "turn"))
        assert one.read_bytes() == other.read_bytes()


def both_run(world: Path, *numbers: int) -> list[int] | None:
    owners = [live_owner(world / f"runs/s/{number}") for number in numbers]
    return [owner.pid for owner in owners] if None not in owners else None


@pytest.mark.slow
@pytest.mark.parametrize("launcher", [JOBLIB, SUBMITIT], ids=["joblib", "submitit_local"])
def test_jobs_run_together_and_come_to_what_they_come_to_in_turn(world: Path, launcher):
    """Each with GPUs of its own; no GPU is needed to see which ones it is given."""
    (world / "cfg").mkdir()
    (world / "cfg/mine.yaml").write_text("# @package _global_\nppo: {num_steps: 2}\n")
    (world / "bad.py").write_text("def score(outputs):\n    raise ValueError('no such luck')\n")
    (world / "good.py").write_text(
        "import os\ndef score(outputs):\n    with open('seen', 'a') as file:\n"
        "        file.write(os.environ['CUDA_VISIBLE_DEVICES'])\n"
        "    return [float(text.count('good')) for text in outputs]\n")
    shared = [word for word in words() if not word.startswith(
        ("ppo.num_steps", "reward.fn", "hardware.device"))]
    given = ["train", "-m", *shared, "+recipe=mine", "--config-dir=cfg",
             "reward.fn=good.py:score,bad.py:score", "seed=1,2"]
    process = spawn(*given, IN, *launcher, cwd=world, PPOCLI_FAULTS="score.before@8:sleep=2",
                    CUDA_VISIBLE_DEVICES="5,7")
    wait_for(lambda: both_run(world, 0, 1), process, 240)
    _, err = process.communicate()
    assert process.returncode == 11, err
    assert err.count("no such luck") == 2
    assert set((world / "seen").read_text()) == {"5", "7"}
    assert "step 2/2" in (world / "runs/s/0.log").read_text()
    run(*given, "hydra.sweep.dir=runs/turn", cwd=world, code=11, CUDA_VISIBLE_DEVICES="")
    assert statuses(world) == statuses(world, "turn") == ["finished"] * 2 + ["failed"] * 2
    assert_same_weights(world, 0, 1)


@pytest.mark.slow
@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGTERM],
                         ids=lambda number: number.name)
@pytest.mark.parametrize("launcher", [JOBLIB, SUBMITIT], ids=["joblib", "submitit_local"])
def test_however_a_sweep_is_stopped_its_jobs_save_and_no_other_starts(world: Path, launcher, sent):
    given = ["train", "-m", *words("ppo.num_steps=4"), "seed=1,2,3"]
    process = spawn(*given, IN, *launcher, cwd=world,
                    PPOCLI_FAULTS="score.before@14:sleep=3,save.before_manifest@2:sleep=3")
    wait_for(lambda: both_saved(world), process, 240)
    pids = both_run(world, 0, 1)
    assert pids is not None
    ended = [os.pidfd_open(pid) for pid in pids]
    if sent == signal.SIGINT:  # the terminal sends Ctrl-C to all
        os.killpg(process.pid, sent)
    else:
        os.kill(process.pid, sent)
    _, err = process.communicate(timeout=120)
    assert process.returncode in (128 + sent, -sent), err
    for descriptor in ended:
        assert select.select([descriptor], [], [], 60)[0], "a job outlives its sweep"
        os.close(descriptor)
    assert statuses(world) == ["stopped", "stopped", "planned"]
    assert not (world / "runs/s/2/config.yaml").exists()
    assert "ppocli sweep resume" in err
    if sent == signal.SIGTERM:
        run("sweep", "resume", "s", cwd=world, code=0)
        run(*given, "hydra.sweep.dir=runs/turn", cwd=world, code=0)
        assert_same_weights(world, 0, 1, 2)


def test_a_job_takes_no_file_of_the_current_folder_for_pythons_own(tmp_path: Path):
    (tmp_path / "subprocess.py").write_text("raise ImportError('of the user')")
    start(["--help"], tmp_path / "log", str(tmp_path), {}).wait()
    assert "Train a language model with PPO." in (tmp_path / "log").read_text()


def test_groups_and_recipes_say_what_jobs_share(world: Path):
    (world / "recipes").mkdir()
    (world / "recipes/mine.yaml").write_text("sweep: {trials: 3}\noutput_dir: elsewhere\n")
    plan = read_plan(read_words(["-m", "+recipe=mine", *words("hardware=ddp"), "seed=1,2",
                                 "sweep.search=random"]))
    assert (plan.shared.sweep.trials, plan.shared.hardware.num_processes,
            plan.shared.output_dir) == (3, 2, "elsewhere")
    single = plan.job(world / "s", 1, ("seed=2",)).words
    composed = compose(read_words(single.argv()))  # its words are typed again
    assert composed.problems() == []
    assert (composed.config.seed, composed.config.run_name) == (2, "1")


@pytest.fixture
def slurm(world: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = slurm_double.install(world / "bin")
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    return folder


@pytest.mark.slow
def test_slurm_runs_the_jobs_and_goes_on_with_one_that_it_has_preempted(world: Path, slurm: Path):
    given = ["train", "-m", *words("ppo.num_steps=4"), "seed=1,2"]
    process = spawn(*given, IN, *SLURM, "hydra.launcher.partition=long", cwd=world,
                    PPOCLI_FAULTS="score.before@14:sleep=3,save.before_manifest@2:sleep=1",
                    PATH=os.environ["PATH"])
    wait_for((world / "runs/s/0/checkpoints/step-000001").exists, process, 240)
    slurm_double.interrupt(slurm, "1_0", signal.SIGUSR2, signal.SIGTERM)
    _, err = process.communicate(timeout=240)
    assert process.returncode == 0, err
    log = (world / "runs/s/0.log").read_text()
    assert re.search(r"saved step (\d)\n(.*\n)*resuming step \1 of 4", log), log
    script = slurm_double.scripts(slurm)[0]
    assert "#SBATCH --time=30" in script
    assert "#SBATCH --partition=long" in script
    run(*given, "hydra.sweep.dir=runs/turn", cwd=world, code=0)
    assert_same_weights(world, 0, 1)
    for number in (0, 1):
        steps = [row["step"] for row in jsonl(world / f"runs/s/{number}/metrics.jsonl")]
        assert steps == sorted(set(steps))


@pytest.mark.parametrize(("more", "message"), [
    (("sweep.trials=3",), "a grid runs every combination"),
    (("sweep.jobs=2",), "hydra/launcher=joblib hydra.launcher.n_jobs=N runs N jobs"),
    (("hydra/launcher=ray",), "pip install 'ppocli[ray]'"),
    (("hydra/launcher=submitit_local", "sweep.search=random"), "hydra.sweeper.max_batch_size=4"),
    (("resume=auto",), "ppocli sweep resume FOLDER continues a sweep"),
    (("run_name=a,b",), "run_name: a sweep has one place"),
    (("ppo.gamma=2",), "ppo.gamma: 2 must be"),
    (("ppo.gamma=interval(0.1,0.2)",), "add sweep.search=optuna or sweep.search=random"),
    (("sweep.search=optuna", "sweep.metric=[reward_mean,kl_mean]", "sweep.direction=maximize"),
     "1 direction for 2 metrics")])
def test_what_is_wrong_with_a_sweep_is_told_before_a_job(more, message, world, command):
    assert message in command("-m", *words(*more), "seed=1,2", code=2).err
    assert not list(world.glob("runs/*/[0-9]"))


def test_a_search_without_ranges_is_refused(world, command):
    assert "there is nothing to search" in command("-m", *words(), "sweep.search=optuna",
                                                   code=2).err


@pytest.mark.slow
def test_a_sweep_has_a_name_and_keys_of_free_mappings_need_no_plus(world, command):
    (world / "rewards.py").write_text("def scaled(outputs, by):\n"
                                      "    return [by * len(text) for text in outputs]\n")
    shared = [*words("ppo.num_steps=1", "reward.fn=rewards.py:scaled"), "reward.kwargs.by=1,3"]
    run("train", "-m", *shared, "run_name=mine", cwd=world, code=0)
    jobs = jobs_now(read_sweep(world / "runs/mine"))
    assert [job.varied for job in jobs] == [{"reward.kwargs.by": "1"}, {"reward.kwargs.by": "3"}]
    assert jobs[1].figures["reward"] > jobs[0].figures["reward"] > 0
    first = command("-m", *shared, "seed=7,8", "ppo.gamma=interval(0.5,1)", "--cfg", "job", "-p",
                    "reward.kwargs", code=0)
    assert first.out == "by: 1\n"
