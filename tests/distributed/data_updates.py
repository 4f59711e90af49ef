"""One rank of a training on a data set: three updates and an evaluation; tell what came of them.

    torchrun ... data_updates.py CONFIG.json OUT.safetensors
"""

import json
import math
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

# the import path has to be set first
import torch
from safetensors.torch import save_file
from sessions import set_keys

from ppocli.config.schema import TrainConfig
from ppocli.distributed.backend import open_ranks
from ppocli.distributed.ranks import StopFlag
from ppocli.models.sharded_weights import gathered
from ppocli.training.loop import initial_state
from ppocli.training.optimize import optimize
from ppocli.training.optimizers import named_trainable
from ppocli.training.state import PhaseClock, TrainState
from ppocli.training.task import PythonObjects, StepContext, TaskSetup, build_task


def main(config: str, out: str) -> None:
    cfg = set_keys(TrainConfig(), json.loads(Path(config).read_text()))
    with open_ranks(cfg) as backend:
        task, stop = build_task(TaskSetup(cfg, backend, PythonObjects())), StopFlag()
        stop.ranks = backend.ranks
        context = StepContext(stop, PhaseClock(backend.device))
        state, losses, done = initial_state(task), [], 0
        for step in range(3):
            batch = task.collect(state, context)
            result = optimize(task, task.plan(state, batch), state, stop)
            losses += [result.terms["total"], result.terms["grad_norm"], result.lr]
            done += len(batch)
            state = TrainState(digests={}, judged_by="", step=step + 1, updates=step + 1,
                               episodes=done)
        found = task.evaluate(context)
        shown = "".join(row.get("response", "") for row in found.samples)
        tensors = {"losses": torch.tensor(losses),
                   # of exp(loss) the loss: in fp32 two of them are 4e-6 apart
                   "eval": torch.tensor([math.log(value) if name == "perplexity" else value
                                         for name, value in sorted(found.figures.items())]),
                   "shown": torch.tensor(list(shown.encode()), dtype=torch.uint8)}
        closing = task.closing()
        tensors["closing"] = torch.tensor([closing[name] for name in sorted(closing)])
        with gathered(task.trained.module, backend.zero_stage):
            tensors |= {f"weight/{name}": parameter.detach().cpu().clone()
                        for name, parameter in named_trainable(task.trained.module).items()}
            if backend.ranks.first and task.saved.adapter is not None and closing:
                task.saved.write(Path(out).with_suffix(".model"))  # merged
        if backend.ranks.first:
            save_file(tensors, out)
        task.close()
        task.trained.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
