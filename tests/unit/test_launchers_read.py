"""What launchers set in the environment, as their documentation has it."""

import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest

from ppocli.config.compose import Checked, Composed
from ppocli.config.schema import HardwareConfig, TrainConfig
from ppocli.distributed.launchers import Launched, find_launch, first_host
from ppocli.errors import ConfigError, RewardError
from ppocli.launch import external_launch
from ppocli.launch.external_launch import placed, run_together

TORCHRUN = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2",
            "MASTER_ADDR": "first", "MASTER_PORT": "29400", "TORCHELASTIC_RUN_ID": "none"}
DEEPSPEED = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_SIZE": "2",
             "CROSS_RANK": "1", "CROSS_SIZE": "2", "MASTER_ADDR": "first", "MASTER_PORT": "29500"}
# what sbatch --nodes=2 --ntasks-per-node=2 gives to its script, which is one process
BATCH = {"SLURM_JOB_ID": "4217", "SLURM_JOBID": "4217", "SLURM_NTASKS": "4", "SLURM_NPROCS": "4",
         "SLURM_NNODES": "2", "SLURM_JOB_NUM_NODES": "2", "SLURM_NTASKS_PER_NODE": "2",
         "SLURM_JOB_NODELIST": "gpu[07-08]", "SLURM_NODELIST": "gpu[07-08]",
         "SLURM_TASKS_PER_NODE": "2(x2)", "SLURM_PROCID": "0", "SLURM_LOCALID": "0",
         "SLURM_NODEID": "0", "SLURM_TASK_PID": "77"}
# and what srun adds for a task of its own
TASK = {**BATCH, "SLURM_STEP_ID": "0", "SLURM_STEPID": "0", "SLURM_STEP_NUM_TASKS": "4",
        "SLURM_STEP_NUM_NODES": "2", "SLURM_STEP_NODELIST": "gpu[07-08]",
        "SLURM_STEP_TASKS_PER_NODE": "2(x2)", "SLURM_PROCID": "3", "SLURM_LOCALID": "1",
        "SLURM_NODEID": "1"}


@pytest.mark.parametrize(("nodelist", "host"), [
    ("gpu1", "gpu1"), ("gpu1,gpu2", "gpu1"), ("node[01-03,07],gpu2", "node01"), ("n[8-11]", "n8"),
    ("n[098-101]-ib", "n098-ib"), ("r[1-2]n[3,5]", "r1n3"), ("a-b.c,d[1]", "a-b.c"), ("", "")])
def test_the_first_host_of_slurm_s_short_form(nodelist, host):
    assert first_host(nodelist) == host


@pytest.mark.parametrize(("environ", "by"), [
    (TORCHRUN, "torchrun"), (DEEPSPEED, "deepspeed"), ({**TASK, **TORCHRUN}, "torchrun")])
def test_ranks_of_launchers(environ, by):
    found = find_launch(environ)
    assert found is not None
    assert (found.by, found.rank, found.world, found.local_world) == (by, 3, 4, 2)
    assert found.variables["LOCAL_RANK"] == "1"
    assert found.variables["MASTER_ADDR"] == "first"


@pytest.mark.parametrize("environ", [
    {}, BATCH, {**BATCH, "SLURM_STEP_ID": "4294967291"},
    {**BATCH, "SLURM_STEP_ID": "4294967290", "SLURM_STEP_NUM_TASKS": "1"},
    {**TASK, "SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0"}, {"WORLD_SIZE": "4"},
    {"RANK": "0", "WORLD_SIZE": "1"}, {"MASTER_ADDR": "x", "MASTER_PORT": "1"}],
    ids=["laptop", "sbatch", "batch step", "salloc's shell", "srun of one", "no rank", "world of 1",
         "only an address"])
def test_one_process_is_taken_for_one(environ):
    assert find_launch(environ) is None


def test_tasks_of_srun_are_ranks():
    found = find_launch(TASK)
    port = found.variables["MASTER_PORT"]
    assert found == Launched("srun", 3, 4, 2, {
        "RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": "gpu07", "MASTER_PORT": port})
    assert 15000 <= int(port) < 30000
    assert find_launch({**TASK, "SLURM_PROCID": "0"}).variables["MASTER_PORT"] == port
    assert find_launch({**TASK, "SLURM_STEP_ID": "1"}).variables["MASTER_PORT"] != port
    given = find_launch({**TASK, "MASTER_ADDR": "gpu08", "MASTER_PORT": "31000"})
    assert given.variables.items() >= {"MASTER_ADDR": "gpu08", "MASTER_PORT": "31000"}.items()


@pytest.mark.parametrize(("environ", "text"), [
    ({"RANK": "0", "WORLD_SIZE": "2"}, "LOCAL_RANK and MASTER_ADDR and MASTER_PORT of"),
    ({**TORCHRUN, "RANK": "4"}, "RANK=4, WORLD_SIZE=4"),
    ({**TORCHRUN, "MASTER_PORT": "none"}, "MASTER_PORT is 'none', not a whole number"),
    ({**TASK, "SLURM_LOCALID": ""}, "LOCAL_RANK of srun are not set"),
    ({**TASK, "SLURM_PROCID": "x"}, "RANK is 'x', not a whole number")])
def test_an_environment_that_makes_no_sense_is_refused(environ, text):
    with pytest.raises(ConfigError, match=text):
        find_launch(environ)


def hardware(environ, *, given=(), **keys) -> HardwareConfig:
    config = replace(TrainConfig(), hardware=HardwareConfig(**keys))
    sources = dict.fromkeys((f"hardware.{name}" for name in keys), "conf/hardware/ddp.yaml:2")
    sources |= dict.fromkeys((f"hardware.{name}" for name in given), "command line")
    checked = Checked(Composed(config, sources=sources))
    return placed(checked, find_launch(environ)).config.hardware


def test_the_launcher_says_how_many():
    for environ in (TORCHRUN, DEEPSPEED, TASK):
        found = hardware(environ, num_processes=8, zero_stage=2)
        assert (found.num_processes, found.num_nodes) == (2, 2)
    with pytest.raises(ConfigError, match="num_processes is 4, but torchrun has started 4"):
        hardware(TORCHRUN, given=["num_processes"], num_processes=4)
    with pytest.raises(ConfigError, match="num_nodes is 3, but srun"):
        hardware(TASK, given=["num_nodes", "num_processes"], num_nodes=3, num_processes=2)
    assert hardware(TASK, given=["num_nodes", "num_processes"], num_nodes=2,
                    num_processes=2).num_nodes == 2
    plain = {name: TORCHRUN[name] for name in TORCHRUN if name != "LOCAL_WORLD_SIZE"}
    assert hardware(plain).num_processes == 4
    assert hardware(plain, given=["num_nodes"], num_nodes=2).num_processes == 2
    uneven = {**TASK, "SLURM_STEP_NUM_TASKS": "3", "SLURM_STEP_TASKS_PER_NODE": "2,1",
              "SLURM_PROCID": "2", "SLURM_LOCALID": "0"}
    assert (hardware(uneven).num_processes, hardware(uneven).num_nodes) == (3, 1)


def test_accelerate_can_keep_a_run_on_the_processor(monkeypatch):
    monkeypatch.setenv("ACCELERATE_USE_CPU", "True")
    assert hardware(TORCHRUN).device == "cpu"


def test_a_rank_that_lost_another_lets_that_one_report_the_cause(capsys, monkeypatch):
    from torch.distributed import HashStore

    store = HashStore()
    monkeypatch.setattr("signal.signal", lambda *_: None)
    monkeypatch.setattr(external_launch, "_PARTING_SECONDS", 1.0)

    def fail(error: Exception) -> None:
        raise error

    ranks = [Launched("srun", rank, 2, 2, {}) for rank in range(2)]
    with ThreadPoolExecutor() as pool:
        codes = [pool.submit(run_together, store, ranks[0],
                             lambda: fail(RuntimeError("gloo: Connection closed by peer")))]
        time.sleep(0.5)  # the connection is gone well before the other has come to its end
        codes.append(pool.submit(run_together, store, ranks[1],
                                 lambda: fail(RewardError("no reward today"))))
        assert [code.result() for code in codes] == [7, 7]
    assert capsys.readouterr().err == "Error: no reward today\n"
