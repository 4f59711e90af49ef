"""Jobs of a sweep beside one another, by Hydra's launcher plugins."""

import os
import re
import select
import signal
from pathlib import Path

import pytest
import slurm_double
from helpers import jsonl, read_json
from runs import run, spawn, wait_for, words

from ppocli.cli.job import start
from ppocli.config.command_words import read_words
from ppocli.config.compose import compose
from ppocli.config.hydra_sweep import run_sweep_jobs
from ppocli.runs.run_folder import live_owner
from ppocli.runs.search import open_study

IN = "hydra.sweep.dir=runs/s"
JOBLIB = ("hydra/launcher=joblib", "hydra.launcher.n_jobs=2")
SUBMITIT = ("hydra/launcher=submitit_local", "hydra.sweeper.max_batch_size=2")
SLURM = ("hydra/launcher=submitit_slurm", "hydra.launcher.timeout_min=30")


def book(world: Path, sweep: str = "s") -> list[dict]:
    return read_json(world / "runs" / sweep / "sweep.json")["jobs"]


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
@pytest.mark.parametrize("launcher", [JOBLIB, SUBMITIT],
                         ids=["joblib", "submitit_local"])
def test_jobs_run_together_and_come_to_what_they_come_to_in_turn(world: Path, launcher):
    (world / "cfg/recipes").mkdir(parents=True)
    (world / "cfg/recipes/mine.yaml").write_text("ppo: {num_steps: 2}\n")
    (world / "bad.py").write_text("def score(outputs):\n    raise ValueError('no such luck')\n")
    own = [word for word in words() if not word.startswith(("ppo.num_steps", "reward.fn"))]
    given = ["train", "-m", *own, "+recipe=mine", "--config-dir=cfg",
             "reward.fn=rewards.py:plain,bad.py:score", "seed=1,2"]
    process = spawn(*given, IN, *launcher, cwd=world, PPOCLI_FAULTS="score.before@8:sleep=2")
    wait_for(lambda: both_run(world, 0, 1), process, 240)
    _, err = process.communicate()
    assert process.returncode == 11, err
    assert "job 0: finished in" in err
    assert err.count("no such luck") == 2
    jobs = book(world)
    assert [job["exit_code"] for job in jobs] == [0, 0, 7, 7]
    assert "no such luck" in jobs[2]["error"]
    assert "step 2/2" in (world / "runs/s/0.log").read_text()
    assert not list((world / "runs/s").glob("[0-9].json"))
    run(*given, "hydra.sweep.dir=runs/turn", cwd=world, code=11)
    for one, other in zip(jobs, book(world, "turn"), strict=True):
        assert (one["varied"], one["status"], one["figures"]) == \
            (other["varied"], other["status"], other["figures"])
    assert_same_weights(world, 0, 1)


@pytest.mark.slow
@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL],
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
    assert [read_json(world / f"runs/s/{number}/summary.json")["status"]
            for number in (0, 1)] == ["stopped", "stopped"]
    assert not (world / "runs/s/2/config.yaml").exists()
    if sent == signal.SIGKILL:
        wait_for(lambda: len(list((world / "runs/s").glob("[01].json"))) == 2)
    else:
        assert [job["status"] for job in book(world)] == ["stopped", "stopped", "planned"]
        assert "ppocli sweep resume" in err
    if sent == signal.SIGTERM:
        run("sweep", "resume", "s", cwd=world, code=0)
        run(*given, "hydra.sweep.dir=runs/turn", cwd=world, code=0)
        assert_same_weights(world, 0, 1, 2)


def test_a_job_takes_no_file_of_the_current_folder_for_pythons_own(tmp_path: Path):
    (tmp_path / "subprocess.py").write_text("raise ImportError('of the user')")
    process = start(["--help"], tmp_path / "log", str(tmp_path), {})
    assert process.exit_code() == 0, (tmp_path / "log").read_text()


def test_groups_and_recipes_say_what_jobs_share(world: Path):
    (world / "recipes").mkdir()
    (world / "recipes/mine.yaml").write_text("sweep: {trials: 3}\noutput_dir: elsewhere\n")
    shared, jobs = [], []

    def begin(facts):
        shared.append(facts.shared)
        return world / "s", jobs.append

    given = ["-m", "+recipe=mine", *words("hardware=ddp"), "seed=1,2", "sweep.search=random"]
    run_sweep_jobs(read_words(given), begin, search=lambda *args: [
        jobs.append(args[4](number, (f"seed={number}",))) for number in (0, 1)])
    assert (shared[0].sweep.trials, shared[0].hardware.num_processes, shared[0].output_dir) == (
        3, 2, "elsewhere")
    for job in jobs:  # whose words are typed again
        single = read_words(job.typed.without("--multirun").argv(whole=True))
        assert compose(single).problems() == []


@pytest.mark.slow
def test_a_search_chooses_alike_whichever_job_ends_first(world: Path):
    """Jobs take uneven times, and one of the two searches is killed."""
    (world / "uneven.py").write_text(
        "import os, time\ndef score(outputs):\n    time.sleep(os.urandom(1)[0] / 128)\n"
        "    return [float(text.split().count('good')) for text in outputs]\n")
    own = [word for word in words("ppo.num_steps=1", "reward.fn=uneven.py:score")
           if not word.startswith("ppo.optimizer.lr")]
    given = ["train", "-m", *own, "ppo.optimizer.lr=tag(log,interval(1e-4,1e-2))",
             "sweep.search=optuna", "sweep.trials=9", *JOBLIB]
    run(*given, "hydra.sweep.dir=runs/whole", cwd=world, code=0)
    process = spawn(*given, IN, cwd=world)
    wait_for((world / "runs/s/6").exists, process, 300)
    os.kill(process.pid, signal.SIGKILL)
    process.communicate()
    wait_for(lambda: not any(live_owner(world / f"runs/s/{number}") for number in range(9)))
    run("sweep", "resume", "s", cwd=world, code=0)
    trials = [[(trial.params, trial.value) for trial in open_study(world / "runs" / name).trials]
              for name in ("s", "whole")]
    assert trials[0] == trials[1]
    assert len({str(params) for params, _ in trials[0]}) == 9


@pytest.mark.slow
def test_each_job_has_its_gpus(world: Path, command, monkeypatch):
    """No GPU is needed to see which ones a job is given; three jobs share two."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5,7")
    own = [word for word in words("ppo.num_steps=1", "reward.fn=seen.py:score")
           if not word.startswith("hardware.device")]
    (world / "seen.py").write_text(
        "import os, pathlib\ndef score(outputs):\n    with open('seen', 'a') as file:\n"
        "        file.write(os.environ['CUDA_VISIBLE_DEVICES'])\n"
        "    return [float(len(text)) for text in outputs]\n")
    command("-m", *own, "seed=1,2,3", IN, "hydra/launcher=joblib", "hydra.launcher.n_jobs=3",
            code=0)
    assert set((world / "seen").read_text()) == {"5", "7"}


@pytest.fixture
def slurm(world: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = slurm_double.install(world / "bin")
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("sent", [(signal.SIGUSR2,), (signal.SIGUSR2, signal.SIGTERM)],
                         ids=["before its time is up", "when it is"])
def test_slurm_runs_the_jobs_and_goes_on_with_one_that_it_has_preempted(world: Path, slurm: Path,
                                                                        sent):
    given = ["train", "-m", *words("ppo.num_steps=4"), "seed=1,2"]
    process = spawn(*given, IN, *SLURM, "hydra.launcher.partition=long", cwd=world,
                    PPOCLI_FAULTS="score.before@14:sleep=3,save.before_manifest@2:sleep=1",
                    PATH=os.environ["PATH"])
    wait_for((world / "runs/s/0/checkpoints/step-000001").exists, process, 240)
    slurm_double.interrupt(slurm, "1_0", *sent)
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


@pytest.mark.slow
def test_a_stopped_sweep_stops_slurms_jobs(world: Path, slurm: Path):
    process = spawn("train", "-m", *words("ppo.num_steps=4"), "seed=1,2", IN, *SLURM, cwd=world,
                    PPOCLI_FAULTS="score.before@8:sleep=3", PATH=os.environ["PATH"])
    wait_for(lambda: both_saved(world), process, 240)
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=120)
    assert process.returncode == 143, err
    assert [job["status"] for job in book(world)] == ["stopped", "stopped"]


@pytest.mark.parametrize(("more", "said"), [
    (("sweep.trials=3",), "a grid runs every combination"),
    (("sweep.jobs=2",), "hydra/launcher=joblib hydra.launcher.n_jobs=N runs N jobs"),
    (("hydra/launcher=ray",), "pip install 'ppocli[ray]'"),
    (("hydra/launcher=nope",), "choose one of: basic, joblib, submitit_local, submitit_slurm"),
    (("hydra/launcher=joblib", "hydra.launcher.jobs=2"), "hydra.launcher.jobs"),
    (("hydra/launcher=submitit_local", "sweep.search=random"), "hydra.sweeper.max_batch_size=4")])
def test_what_is_wrong_with_a_sweep_is_told_before_a_job(more, said, world, command):
    assert said in command("-m", *words(*more), "seed=1,2", code=2).err
    assert not list(world.glob("runs/*/[0-9]"))
