"""The commands of Slurm that submitit calls, for one machine: ``sbatch`` runs the batch script at
once for each index of its array, ``srun`` its command, ``scontrol requeue`` the script again when
it has ended.

``install(folder)`` puts them into a folder for ``PATH``; their state lies beside them.
"""

import os
import re
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path

NAMES = ("sbatch", "srun", "sacct", "scancel", "scontrol")


def install(folder: Path) -> Path:
    """Make the commands; returns the folder."""
    folder.mkdir(parents=True)
    for name in NAMES:
        path = folder / name
        path.write_text(f"#!/bin/sh\nexec {sys.executable} {__file__} {name} {folder} \"$@\"\n")
        path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return folder


def scripts(folder: Path) -> list[str]:
    """The batch scripts that were handed in, job by job."""
    return [path.read_text() for path in sorted(folder.glob("job-*.sh"))]


def interrupt(folder: Path, name: str, *sent: signal.Signals) -> None:
    """Send signals to all processes of a job's step, such as ``1_0``, as Slurm does."""
    step = int((folder / f"step-{name}").read_text())
    for process in (step, *_children(step)):
        for one in sent:
            os.kill(process, one)
            time.sleep(0.05)  # or two of a kind would be taken for one


def _children(pid: int) -> list[int]:
    found = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [each for child in map(int, found) for each in (child, *_children(child))]


def _sbatch(folder: Path, script: str) -> None:
    number = 1 + len(list(folder.glob("job-*.sh")))
    copy = folder / f"job-{number}.sh"
    copy.write_text(Path(script).read_text())
    indices = re.search(r"#SBATCH --array=0-(\d+)", copy.read_text())
    for index in range(int(indices[1]) + 1 if indices else 1):
        subprocess.Popen([sys.executable, __file__, "batch", str(folder), f"{number}_{index}",
                          str(copy)], start_new_session=True, stdin=subprocess.DEVNULL,
                         stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    print(f"Submitted batch job {number}")


def _batch(folder: Path, name: str, script: str) -> None:
    number, _, index = name.partition("_")
    variables = {"SLURM_JOB_ID": name, "SLURM_NTASKS": "1", "SLURM_JOB_NUM_NODES": "1",
                 "SLURM_NODEID": "0", "SLURM_PROCID": "0", "SLURM_LOCALID": "0",
                 "SLURM_STEP_ID": "0", "SLURM_JOB_NODELIST": "localhost",
                 "SLURM_ARRAY_JOB_ID": number, "SLURM_ARRAY_TASK_ID": index}
    again = folder / f"again-{name}"
    while True:
        again.unlink(missing_ok=True)
        subprocess.run(["bash", script], check=False, env={**os.environ, **variables})
        if not again.exists():
            break
    (folder / f"over-{name}").touch()


def _srun(folder: Path, *words: str) -> None:
    command = list(words)
    while command[0].startswith("--"):
        taken = 2 if command[0] in ("--output", "--error") else 1
        command = command[taken:]
    (folder / f"step-{os.environ['SLURM_JOB_ID']}").write_text(str(os.getpid()))
    os.execvp(command[0], command)


def _sacct(folder: Path, *words: str) -> None:
    print("JobID|State|NodeList")
    for step in folder.glob("step-*"):
        name = step.name.removeprefix("step-")
        state = "COMPLETED" if (folder / f"over-{name}").exists() else "RUNNING"
        print(f"{name}|{state}|localhost")


def _scancel(folder: Path, state: str, *numbers: str) -> None:
    assert state == "--state=PENDING"  # here no job waits


def _scontrol(folder: Path, word: str, number: str) -> None:
    assert word == "requeue"
    (folder / f"again-{number}").touch()


if __name__ == "__main__":
    {"sbatch": _sbatch, "batch": _batch, "srun": _srun, "sacct": _sacct,
     "scancel": _scancel, "scontrol": _scontrol}[sys.argv[1]](Path(sys.argv[2]), *sys.argv[3:])
