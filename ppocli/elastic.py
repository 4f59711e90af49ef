"""Several processes of one run on this machine: ``python -m ppocli.elastic RUN_DIR [--resume]``.

torch's elastic agent starts the ranks and ends them all when one fails. Signals go to the ranks,
which stop together; the agent only waits. What each came to is read from a file of its own.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ppocli.config.resolved import next_config, read_config
from ppocli.config.schema import TrainConfig
from ppocli.engine.outcomes import OUTCOMES, RankOutcome, hand_on, read_outcomes
from ppocli.engine.stop import stop_when_closed


def _launch_config(cfg: TrainConfig, node_rank: int) -> Any:
    from torch.distributed.launcher.api import LaunchConfig

    hardware = cfg.hardware
    several = hardware.num_nodes > 1
    return LaunchConfig(
        min_nodes=hardware.num_nodes, max_nodes=hardware.num_nodes,
        nproc_per_node=hardware.num_processes, run_id=str(cfg.run_name), role="rank",
        rdzv_backend="static" if several else "c10d",
        rdzv_endpoint=hardware.rdzv_endpoint or "localhost:0",
        rdzv_configs={"rank": node_rank, "timeout": hardware.timeout_seconds}
        if several else {"timeout": hardware.timeout_seconds},
        max_restarts=0, monitor_interval=0.1,
        # ours go to the ranks; this one nobody sends, and none at all the agent complains of
        signals_to_handle="SIGUSR2",
        shutdown_timeout=min(hardware.timeout_seconds, 30))


def run_ranks(run_dir: Path, words: Sequence[str]) -> int:
    """Start the ranks, wait for them, say what ended them; returns the exit code."""
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import elastic_launch

    cfg = read_config(next_config(run_dir) if "--resume" in words else run_dir / "config.yaml")
    # the folder's configuration is node 0's
    node_rank = next((int(word.partition("=")[2]) for word in words
                      if word.startswith("--node-rank=")), cfg.hardware.node_rank)
    words = [word for word in words if not word.startswith("--node-rank=")]
    # what it would say of a failed rank is said here, once
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    os.environ.setdefault("OMP_NUM_THREADS", str(cfg.hardware.num_threads or 1))
    with tempfile.TemporaryDirectory(prefix="ppocli-ranks-") as folder:
        os.environ[OUTCOMES] = folder
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, lambda got, _: hand_on(Path(folder), got))
        failed: tuple[int, int] | None = None
        try:
            elastic_launch(_launch_config(cfg, node_rank), sys.executable)(
                "-m", "ppocli.worker", str(run_dir), *words)
        except ChildFailedError as error:
            rank, failure = error.get_first_failure()
            failed = rank, failure.exitcode
        return _conclude(read_outcomes(Path(folder)), failed)


def _conclude(outcomes: list[RankOutcome], failed: tuple[int, int] | None) -> int:
    """The exit code and the one message of the whole job.

    Args:
        outcomes: what the ranks said, the earliest first.
        failed: rank and exit code (negative: a signal) of the first that the agent saw fail.
    """
    bad = [outcome for outcome in outcomes if outcome.code != 0]
    expected = [outcome for outcome in bad if not outcome.trace]
    # a rank whose neighbour was killed complains of its connection: that is not the cause
    if failed is not None and failed[1] < 0 and not expected:
        sys.stderr.write(
            f"Error: rank {failed[0]} was killed by {signal.Signals(-failed[1]).name}; the other "
            "ranks were ended.\n  fix:   go on from the last checkpoint: ppocli resume RUN\n")
        return 1
    if bad:
        first = (expected or bad)[0]
        label = "Stopped" if first.code > 128 else "Error"
        sys.stderr.write(f"{first.trace}{label}: {first.message}\n")
        return first.code
    if failed is not None:
        sys.stderr.write(f"Error: rank {failed[0]} ended with exit code {failed[1]} and said "
                         "nothing.\n")
        return 1
    return 0


def main(argv: list[str]) -> int:
    """``python -m ppocli.elastic RUN_DIR [--resume] [--display=MODE] [--lifeline=FD]``; returns the
    exit code."""
    for word in argv:
        if word.startswith("--lifeline="):
            stop_when_closed(int(word.partition("=")[2]))
    words = [word for word in argv if word.startswith("--") and not word.startswith("--lifeline")]
    return run_ranks(Path(next(word for word in argv if not word.startswith("--"))), words)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
