"""The commands of Slurm that submitit calls, for one machine: ``sbatch`` runs the batch script at
once, ``srun`` its command, ``scontrol requeue`` the script again when it has ended.

``install(folder)`` puts them into a folder for ``PATH``; their state lies beside them.
"""

import os
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path

NAMES = ("sbatch", "srun", "sacct", "squeue", "scancel", "scontrol")


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


def interrupt(folder: Path, number: int, *sent: signal.Signals) -> None:
    """Send signals to all processes of a job's step, as Slurm does."""
    step = int((folder / f"step-{number}").read_text())
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
    subprocess.Popen([sys.executable, __file__, "batch", str(folder), str(number), str(copy)],
                     start_new_session=True, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
                     stderr=subprocess.DEVNULL)
    print(f"Submitted batch job {number}")


def _batch(folder: Path, number: str, script: str) -> None:
    variables = {"SLURM_JOB_ID": number, "SLURM_NTASKS": "1", "SLURM_JOB_NUM_NODES": "1",
                 "SLURM_NODEID": "0", "SLURM_PROCID": "0", "SLURM_LOCALID": "0",
                 "SLURM_STEP_ID": "0", "SLURM_JOB_NODELIST": "localhost"}
    again = folder / f"again-{number}"
    while True:
        again.unlink(missing_ok=True)
        subprocess.run(["bash", script], check=False, env={**os.environ, **variables})
        if not again.exists():
            break
    (folder / f"over-{number}").touch()


def _srun(folder: Path, *words: str) -> None:
    command = list(words)
    while command[0].startswith("--"):
        taken = 2 if command[0] in ("--output", "--error") else 1
        command = command[taken:]
    (folder / f"step-{os.environ['SLURM_JOB_ID']}").write_text(str(os.getpid()))
    os.execvp(command[0], command)


def _squeue(folder: Path, *words: str) -> None:
    number = words[-1]
    if not (folder / f"job-{number}.sh").exists():
        sys.exit("slurm_load_jobs error: Invalid job id specified")
    if not (folder / f"over-{number}").exists():
        print(f"{number} RUNNING")


def _sacct(folder: Path, *words: str) -> None:
    if (folder / "no-accounting").exists():
        sys.exit("Slurm accounting storage is disabled")
    print("JobID|State|NodeList")
    for number in (each for each in words if each.isdigit()):
        state = "COMPLETED" if (folder / f"over-{number}").exists() else "RUNNING"
        print(f"{number}|{state}|localhost")


def _scancel(folder: Path, number: str) -> None:
    interrupt(folder, int(number), signal.SIGTERM)


def _scontrol(folder: Path, word: str, number: str) -> None:
    assert word == "requeue"
    (folder / f"again-{number}").touch()


if __name__ == "__main__":
    {"sbatch": _sbatch, "batch": _batch, "srun": _srun, "sacct": _sacct, "squeue": _squeue,
     "scancel": _scancel, "scontrol": _scontrol}[sys.argv[1]](Path(sys.argv[2]), *sys.argv[3:])
