"""One rank of a loop of one's own: two steps and a third after a resume, each rank with queries of
its own, and what came of them.

    torchrun ... own_loop.py CONFIG.json OUT.safetensors
"""

import json
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

# the import path has to be set first
import torch
from helpers import VOLATILE
from safetensors.torch import save_file

from ppocli import PPOTrainer
from ppocli.training.optimizers import named_trainable

QUERIES = ["the film", "i saw", "this plot was", "it", "the cast and the music", "a good film"]


def share(rows: list, rank: int, world: int) -> list:
    """Of two ranks the first has one more than the second, or two."""
    cut = len(rows) // 2 + 1
    return rows if world == 1 else [rows[:cut], rows[cut:]][rank]


def good(texts: list[str]) -> list[float]:
    return [text.split().count("good") + len(text) / 100 for text in texts]


def main(config: str, out: str) -> None:
    rank, world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    words = json.loads(Path(config).read_text())["words"]
    found: dict[str, torch.Tensor] = {}

    def note(name: str, trainer: PPOTrainer, figures: dict) -> None:
        found[f"figures/{name}"] = torch.tensor([
            float(value or 0.0) for key, value in sorted(figures.items())
            if not key.startswith(VOLATILE)], dtype=torch.float64)
        trainer.log(figures)

    with PPOTrainer([*words, "run_name=loop"]) as trainer:
        batch = trainer.generate(share(QUERIES, rank, world), batch_size=2)
        note("own", trainer, trainer.step(batch, good(batch.responses)))
        batch = trainer.generate()  # 5 of the configuration's prompts
        note("dealt", trainer, trainer.step(batch, good(batch.responses)))
        trainer.save_checkpoint()
    with PPOTrainer([f"resume={trainer.run_dir}"]) as trainer:
        queries, responses, masks = (share(rows, rank, world) for rows in (
            [[4, 9], [12], [7, 8], [5]], [[4, 9, 1], [12, 5], [30], [9, 3, 3, 1]],
            [[1, 0, 1], [0, 1], [1], [1, 1, 0, 0]]))
        scores = share([1.0, -1.0, 0.5, 2.0], rank, world)
        note("given", trainer, trainer.step(queries, responses, scores, masks))
        found |= {f"weight/{name}": value.detach().clone() for name, value in
                  named_trainable(trainer._task.trained.module).items()}
        run = trainer.finish()
        if rank == 0:
            save_file(found, out)
        assert run.summary["steps"] == 3


if __name__ == "__main__":
    main(*sys.argv[1:])
