"""``python -m ppocli.doctor.gloo_probe FILE RANK SIZE``: one rank of a small all-reduce."""

from __future__ import annotations

import json
import sys
from datetime import timedelta
from pathlib import Path

PATIENCE = timedelta(seconds=20)


def main(meeting: str, rank: int, size: int) -> int:
    """Sum the numbers 1 to ``size`` over as many processes that meet at a file; print the sum."""
    import torch
    import torch.distributed as dist

    try:
        dist.init_process_group("gloo", init_method=Path(meeting).as_uri(), rank=rank,
                                world_size=size, timeout=PATIENCE)
        number = torch.tensor([rank + 1.0])
        dist.all_reduce(number)
        dist.destroy_process_group()
        facts: dict[str, object] = {"sum": float(number)}
    except (RuntimeError, ValueError, OSError) as error:
        facts = {"error": (str(error).splitlines() or [type(error).__name__])[0]}
    sys.stdout.write("\n" + json.dumps(facts) + "\n")
    sys.stdout.flush()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3])))
