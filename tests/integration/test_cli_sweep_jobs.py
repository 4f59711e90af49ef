"""Jobs of a sweep beside one another: ``sweep.jobs``, and Slurm's queue through submitit."""

import os
import re
import select
import signal
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import slurm_double
from helpers import jsonl, read_json
from runs import run, spawn, wait_for, words

from ppocli.cli.job import start
from ppocli.cli.sweep_jobs import _Queued
from ppocli.config.compose import compose
from ppocli.config.sweep import run_sweep_jobs
from ppocli.config.words import read_words
from ppocli.runs.search import open_study
from ppocli.storage.run_folder import live_owner

TWO = ("hydra.sweep.dir=runs/s", "sweep.jobs=2")


def book(world: Path, sweep: str = "s") -> list[dict]:
    return read_json(world / "runs" / sweep / "sweep.json")["jobs"]


def both_saved(world: Path) -> bool:
    return all((world / f"runs/s/{n}/checkpoints/step-000001").exists() for n in (0, 1))


def assert_same_weights(world: Path, *numbers: int) -> None:
    """Jobs beside one another came to what those of ``runs/turn`` came to."""
    for number in numbers:
        one, other = (world / f"runs/{sweep}/{number}/model/model.safetensors"
                      for sweep in ("s", "turn"))
        assert one.read_bytes() == other.read_bytes()


def both_run(world: Path, *numbers: int) -> list[int] | None:
    owners = [live_owner(world / f"runs/s/{number}") for number in numbers]
    return [owner.pid for owner in owners] if None not in owners else None


@pytest.mark.long
def test_jobs_run_together_and_come_to_what_they_come_to_in_turn(world: Path):
    given = ["train", "-m", *words("ppo.num_steps=2"), "seed=1,2", "ppo.gamma=1,2"]
    process = spawn(*given, *TWO, cwd=world, PPOCLI_FAULTS="score.before@8:sleep=2")
    wait_for(lambda: both_run(world, 0, 2), process)
    _, err = process.communicate()
    assert process.returncode == 11, err
    assert "job 0: finished in" in err
    jobs = book(world)
    assert [job["exit_code"] for job in jobs] == [0, 2] * 2  # gamma=2 is refused before it starts
    assert "ppo.gamma: 2 must be" in jobs[1]["error"]
    log = (world / "runs/s/0.log").read_text()
    assert "step 2/2" in log
    run(*given, "hydra.sweep.dir=runs/turn", cwd=world, code=11)
    turn = book(world, "turn")
    for one, other in zip(jobs, turn, strict=True):
        assert (one["varied"], one["status"], one["figures"]) == \
            (other["varied"], other["status"], other["figures"])
    assert_same_weights(world, 0, 2)


def test_a_job_takes_no_file_of_the_current_folder_for_pythons_own(tmp_path: Path):
    (tmp_path / "subprocess.py").write_text("raise ImportError('of the user')")
    process, lifeline = start(["--help"], tmp_path / "log", cwd=str(tmp_path))
    assert process.wait(60) == 0, (tmp_path / "log").read_text()
    os.close(lifeline)


def test_groups_and_recipes_say_what_jobs_share(world: Path):
    (world / "recipes").mkdir()
    (world / "recipes/mine.yaml").write_text("sweep: {jobs: 3}\noutput_dir: elsewhere\n")
    shared, jobs = [], []

    def begin(config, grid):
        shared.append(config)
        return world / "s"

    given = ["-m", "+recipe=mine", *words("hardware=ddp"), "seed=1,2"]
    run_sweep_jobs(read_words(given), jobs.append, begin, search=lambda *_: None)
    assert (shared[0].sweep.jobs, shared[0].hardware.num_processes, shared[0].output_dir) == (
        3, 2, "elsewhere")
    for job in jobs:  # whose words are typed again
        single = read_words(job.typed.without("--multirun").argv(whole=True))
        assert compose(single).problems() == []


@pytest.mark.long
def test_what_a_job_says_of_its_failure_is_told(world: Path, command):
    (world / "bad.py").write_text("def score(outputs):\n    raise ValueError('no such luck')\n")
    said = command("-m", *words("reward.fn=bad.py:score", "ppo.num_steps=1"), "seed=1,2", *TWO,
                   code=11).err
    assert said.count("no such luck") == 2
    assert [job["exit_code"] for job in book(world)] == [7, 7]
    assert "no such luck" in book(world)[0]["error"]


@pytest.mark.slow
def test_sigterm_stops_all_and_the_sweep_goes_on(world: Path):
    given = ["train", "-m", *words("ppo.num_steps=4"), "seed=1,2,3"]
    process = spawn(*given, *TWO, cwd=world, PPOCLI_FAULTS="score.before@14:sleep=3")
    wait_for(lambda: both_saved(world), process)
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 143, err
    assert [job["status"] for job in book(world)] == ["stopped", "stopped", "planned"]
    assert "ppocli sweep resume" in err
    run("sweep", "resume", "s", cwd=world, code=0)
    run(*given, "hydra.sweep.dir=runs/turn", cwd=world, code=0)
    assert_same_weights(world, 0, 1, 2)


@pytest.mark.slow
def test_kill_9_of_the_sweep_stops_all_its_jobs(world: Path):
    process = spawn("train", "-m", *words("ppo.num_steps=4"), "seed=1,2", *TWO, cwd=world,
                    PPOCLI_FAULTS="score.before@8:sleep=3")
    wait_for(lambda: both_run(world, 0, 1), process)
    pids = both_run(world, 0, 1)
    assert pids is not None
    ended = [os.pidfd_open(pid) for pid in pids]
    wait_for(lambda: both_saved(world), process)
    os.kill(process.pid, signal.SIGKILL)
    process.communicate()
    for descriptor in ended:
        assert select.select([descriptor], [], [], 60)[0], "a job outlives its sweep"
        os.close(descriptor)
    assert [read_json(world / f"runs/s/{n}/summary.json")["status"]
            for n in (0, 1)] == ["stopped", "stopped"]


@pytest.mark.slow
def test_a_search_chooses_alike_whichever_job_ends_first(world: Path):
    """Jobs take uneven times, and one of the two searches is killed."""
    (world / "uneven.py").write_text(
        "import os, time\ndef score(outputs):\n    time.sleep(os.urandom(1)[0] / 128)\n"
        "    return [float(text.split().count('good')) for text in outputs]\n")
    own = [word for word in words("ppo.num_steps=1", "reward.fn=uneven.py:score")
           if not word.startswith("ppo.optimizer.lr")]
    given = ["train", "-m", *own, "ppo.optimizer.lr=tag(log,interval(1e-4,1e-2))",
             "sweep.search=optuna", "sweep.trials=9", "sweep.jobs=2"]
    run(*given, "hydra.sweep.dir=runs/whole", cwd=world, code=0)
    process = spawn(*given, "hydra.sweep.dir=runs/s", cwd=world)
    wait_for((world / "runs/s/6").exists, process)
    os.kill(process.pid, signal.SIGKILL)
    process.communicate()
    wait_for(lambda: not any(live_owner(world / f"runs/s/{number}") for number in range(9)))
    run("sweep", "resume", "s", cwd=world, code=0)
    trials = [[(trial.params, trial.value) for trial in open_study(world / "runs" / name).trials]
              for name in ("s", "whole")]
    assert trials[0] == trials[1]
    assert len({str(params) for params, _ in trials[0]}) == 9


@pytest.mark.long
def test_each_job_has_its_gpus(world: Path, command, monkeypatch):
    """No GPU is needed to see which ones a job is given."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5,7")
    own = [word for word in words("ppo.num_steps=1", "reward.fn=seen.py:score")
           if not word.startswith("hardware.device")]
    (world / "seen.py").write_text(
        "import os, pathlib\ndef score(outputs):\n    with open('seen', 'a') as file:\n"
        "        file.write(os.environ['CUDA_VISIBLE_DEVICES'])\n"
        "    return [float(len(text)) for text in outputs]\n")
    said = command("-m", *own, "seed=1,2,3", "sweep.jobs=3", code=2).err
    assert "sweep.jobs=3: each job has GPUs of its own" in said
    assert "fix:   sweep.jobs=2" in said
    assert not list(world.glob("runs/*/*"))
    command("-m", *own, "seed=1,2", *TWO, code=0)
    assert set((world / "seen").read_text()) == {"5", "7"}


@pytest.fixture
def slurm(world: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = slurm_double.install(world / "bin")
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    return folder


ON_SLURM = ("hydra.sweep.dir=runs/s", "sweep.launcher=slurm", "sweep.jobs=2",
            "sweep.slurm.timeout_min=30")


@pytest.mark.slow
@pytest.mark.parametrize("sent", [(signal.SIGUSR2,), (signal.SIGUSR2, signal.SIGTERM)],
                         ids=["before its time is up", "when it is"])
def test_slurm_runs_the_jobs_and_goes_on_with_one_that_it_has_preempted(world: Path, slurm: Path,
                                                                        sent):
    given = ["train", "-m", *words("ppo.num_steps=4"), "seed=1,2"]
    process = spawn(*given, *ON_SLURM, "sweep.slurm.slurm_partition=long", cwd=world,
                    PPOCLI_FAULTS="score.before@14:sleep=3,save.before_manifest@2:sleep=1",
                    PATH=os.environ["PATH"])
    wait_for((world / "runs/s/0/checkpoints/step-000001").exists, process)
    slurm_double.interrupt(slurm, 1, *sent)
    _, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    assert "job 0: Slurm's job 1" in err
    told = (world / "runs/s/0.log").read_text()
    assert re.search(r"saved step (\d)\n(.*\n)*resuming step \1 of 4", told), told
    script = slurm_double.scripts(slurm)[0]
    assert "#SBATCH --time=30" in script
    assert "#SBATCH --partition=long" in script
    run(*given, "hydra.sweep.dir=runs/turn", cwd=world, code=0)
    assert_same_weights(world, 0, 1)
    for number in (0, 1):
        steps = [row["step"] for row in jsonl(world / f"runs/s/{number}/metrics.jsonl")]
        assert steps == sorted(set(steps))


@pytest.mark.long
def test_a_stopped_sweep_cancels_slurms_jobs(world: Path, slurm: Path):
    process = spawn("train", "-m", *words("ppo.num_steps=4"), "seed=1,2", *ON_SLURM, cwd=world,
                    PPOCLI_FAULTS="score.before@8:sleep=3", PATH=os.environ["PATH"])
    wait_for(lambda: both_saved(world), process)
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 143, err
    assert [job["status"] for job in book(world)] == ["stopped", "stopped"]


@pytest.mark.parametrize(("more", "said"), [
    ((), "Slurm has to be told how long a job may take"),
    (("sweep.slurm.timeout_min=5", "sweep.launcher=local"), "has an effect with sweep.launcher"),
    (("sweep.slurm.timeout_min=5", "hardware.num_nodes=2", "sweep.launcher=local", "sweep.jobs=2"),
     "jobs of several nodes"),
    (("sweep.slurm.timeout_min=5", "sweep.trials=3"), "a grid runs every combination"),
    (("sweep.slurm.timeout_min=5",), "Slurm can't be used: Could not detect \"srun\""),
    (("sweep.slurm.timeout_min=5", "hydra/sweeper=basic", "sweep.jobs=0"), "sweep.jobs")])
def test_what_is_wrong_with_slurm_is_told_before_a_job(more, said, world, command, monkeypatch):
    monkeypatch.setenv("PATH", str(world))  # where no srun is
    assert said in command("-m", *words("sweep.launcher=slurm", *more), "seed=1,2", code=2).err
    assert not list(world.glob("runs/*/[0-9]"))


@pytest.mark.parametrize(("more", "name"), [
    (["hydra/launcher=joblib"], "joblib"), (["hydra/launcher=pool"], "pool"),
    (["hydra/launcher=pool", "sweep.search=random"], "pool"),
    (["hydra.launcher._target_=pool.Pool"], "pool.Pool"), (["--config-name=mine"], "pool")])
def test_launchers_of_hydra_are_refused_installed_or_not(more, name, world, app):
    """As ``hydra/launcher=pool`` would be found after an install of its plugin."""
    (world / "cfg/hydra/launcher").mkdir(parents=True)
    (world / "cfg/hydra/launcher/pool.yaml").write_text("_target_: pool.Pool\n")
    (world / "cfg/mine.yaml").write_text("defaults: [train, override hydra/launcher: pool]\n")
    for command in ("train", "validate"):
        said = app(command, "-m", "--config-dir=cfg", *words("ppo.gamma=0.9,1"), *more, code=2).err
        assert f"Error: hydra/launcher={name}: ppocli starts the jobs of a sweep itself" in said
        assert "sweep.jobs=4" in said
    assert not (world / "runs").exists()


def test_without_submitit(world, command, monkeypatch):
    monkeypatch.setitem(sys.modules, "submitit", None)
    said = command("-m", *words(), "seed=1,2", "sweep.launcher=slurm", "sweep.slurm.timeout_min=5",
                   code=2).err
    assert "pip install 'ppocli[slurm]'" in said


def test_slurm_is_asked_about_a_job_that_was_cancelled_in_the_queue(tmp_path):
    class Pending:
        """As submitit's: without a result it asks Slurm only when it must."""

        state = "PENDING"
        paths = SimpleNamespace(result_pickle=tmp_path / "result.pkl")

        def cancel(self, check):
            pass

        def done(self, force_check):
            return force_check

    job = _Queued(Pending(), tmp_path / "log")
    assert job.code() is None
    job.send(signal.SIGTERM)
    assert job.code() == 143


def test_a_job_that_left_the_queue_without_a_trace_is_not_waited_for(tmp_path, slurm, monkeypatch):
    """As Slurm without accounting has it: submitit learns nothing, and there is no result."""
    monkeypatch.setattr("ppocli.cli.sweep_jobs._ASK", 0.0)
    (slurm / "job-1.sh").touch()
    gone = SimpleNamespace(job_id="1", state="UNKNOWN", done=lambda force_check: False,
                           cancel=lambda check: None,
                           paths=SimpleNamespace(result_pickle=tmp_path / "result.pkl"))
    job = _Queued(gone, tmp_path / "log")
    assert [job.code() for _ in range(4)] == [None] * 4
    (slurm / "over-1").touch()
    assert [job.code() for _ in range(3)] == [None, None, 1]
    assert "Error: Slurm's job 1 left the queue without a result" in job.log.read_text()
    job.send(signal.SIGTERM)
    assert job.code() == 143
    other = _Queued(SimpleNamespace(**{**vars(gone), "job_id": "7"}), tmp_path / "log")
    assert [other.code() for _ in range(3)] == [None, None, 1]
    monkeypatch.setenv("PATH", str(tmp_path))  # no squeue
    assert [_Queued(gone, tmp_path / "log").code() for _ in range(5)] == [None] * 5


@pytest.mark.slow
def test_a_cluster_without_accounting_runs_the_jobs(world: Path, slurm: Path):
    (slurm / "no-accounting").touch()
    process = spawn("train", "-m", *words("ppo.num_steps=4"), "seed=1,2", *ON_SLURM, cwd=world,
                    PPOCLI_FAULTS="score.before@8:sleep=3", PATH=os.environ["PATH"])
    wait_for((world / "runs/s/0/checkpoints/step-000001").exists, process)
    os.kill(int((slurm / "step-1").read_text()), signal.SIGKILL)  # as a node that fails
    _, err = process.communicate(timeout=120)
    assert process.returncode == 11, err
    assert "left the queue without a result" in err
    assert "Bypassing" not in err
    assert [job["status"] for job in book(world)] == ["failed", "finished"]
