"""``ppocli`` on the simulated accelerator, as a command: ``python command.py train ...``."""

import os
import sys
from pathlib import Path
from unittest import mock

sys.path.append(str(Path(__file__).parents[1]))
import warm


def run() -> None:
    """The command, in this process."""
    import simulated

    simulated.register()
    os.environ["ACCELERATE_TORCH_DEVICE"] = simulated.NAME  # without a number, as CUDA's is
    with simulated.opened(), mock.patch("torch.cuda.is_available", return_value=True):
        from ppocli.cli.app import main

        main()


if __name__ == "__main__":
    if warm.SERVER in os.environ:  # without the seconds that libraries take to load
        sys.exit(warm.ask([__file__, *sys.argv[1:]]))
    run()
