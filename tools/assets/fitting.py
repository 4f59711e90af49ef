"""The little that fitting the built-in models has in common: batches, the optimizer, saving.

Weights are initialised and data are shuffled from seeds of their own, so that a model is a
function of its settings alone. Nothing here moves the global random state.
"""

import logging
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from ppocli.errors import DiskError

log = logging.getLogger(__name__)

IGNORED = -100
"""label of a position that the loss leaves out (torch's and transformers' convention)"""


@contextmanager
def own_seed(seed: int) -> Iterator[None]:
    """Run a block with torch's CPU generator at ``seed`` and put its state back afterwards.

    ``torch.manual_seed`` would also reseed every CUDA device, so only the CPU generator is used.
    """
    state = torch.random.get_rng_state()
    torch.random.default_generator.manual_seed(seed)
    try:
        yield
    finally:
        torch.random.set_rng_state(state)


def length_batches(lengths: Sequence[int], batch_size: int, epochs: int,
                   seed: int) -> list[list[int]]:
    """Row numbers in batches of near-equal length, reshuffled every epoch from ``seed``.

    Rows are sorted by length within pools of 16 batches only, so batches stay mixed.
    """
    generator = torch.Generator().manual_seed(seed)
    batches: list[list[int]] = []
    for _ in range(epochs):
        order = torch.randperm(len(lengths), generator=generator).tolist()
        pool_size = 16 * batch_size
        epoch: list[list[int]] = []
        for start in range(0, len(order), pool_size):
            pool = sorted(order[start:start + pool_size], key=lambda row: lengths[row])
            epoch += [pool[at:at + batch_size] for at in range(0, len(pool), batch_size)]
        batches += [epoch[i] for i in torch.randperm(len(epoch), generator=generator).tolist()]
    return batches


def pad_rows(rows: Sequence[Sequence[int]], fill: int) -> torch.Tensor:
    """Rows of token ids right-padded with ``fill``: [rows, longest] int64."""
    width = max(len(row) for row in rows)
    return torch.tensor([[*row, *([fill] * (width - len(row)))] for row in rows])


def fit(model: PreTrainedModel, loss_at: Callable[[int], torch.Tensor], *, steps: int, lr: float,
        name: str) -> float:
    """AdamW with a short warm-up and a cosine to zero. Returns the mean loss of the last tenth.

    Args:
        loss_at: the loss of step ``i``, a scalar with a graph.
        name: what the progress lines in the log call the model.
    """
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, betas=(0.9, 0.98), weight_decay=0.01)
    warmup = max(1, steps // 20)

    def scale(step: int) -> float:
        if step < warmup:
            return (step + 1) / warmup
        return 0.5 * (1 + math.cos(math.pi * (step - warmup) / max(1, steps - warmup)))

    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, scale)
    model.train()
    losses: list[float] = []
    with torch.enable_grad():
        for step in range(steps):
            loss = loss_at(step)
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            losses.append(loss.item())
            if (step + 1) % 100 == 0:
                log.debug("%s: step %d of %d, loss %.4f", name, step + 1, steps,
                          sum(losses[-100:]) / 100)
    model.eval()
    tail = losses[-max(1, steps // 10):]
    return sum(tail) / len(tail)


def save_folder(model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, folder: Path,
                stored: torch.dtype = torch.float32) -> None:
    """Write a plain Hugging Face folder: config, weights, tokenizer.

    ``config.json`` always says float32, so weights stored as float16 load as float32. Weights are
    written with safetensors directly: ``save_pretrained`` draws progress bars and imports whatever
    accelerators are installed.

    Raises:
        DiskError: the folder can't be written.
    """
    model.config.architectures = [type(model).__name__]
    model.config.dtype = torch.float32
    tensors: dict[str, torch.Tensor] = {}
    seen: set[int] = set()
    for name, tensor in model.state_dict().items():
        if tensor.data_ptr() not in seen:  # a tied weight is stored once
            seen.add(tensor.data_ptr())
            tensors[name] = tensor.detach().to(stored).contiguous()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        model.config.save_pretrained(folder)
        if model.can_generate() and model.generation_config is not None:
            model.generation_config.save_pretrained(folder)
        weights = folder / "model.safetensors"
        save_file(tensors, weights, metadata={"format": "pt"})
        weights.chmod(0o644)  # safetensors leaves it readable by its owner alone
        tokenizer.save_pretrained(folder)
    except (OSError, SafetensorError) as error:
        raise DiskError(f"could not write the model folder: {error}", where=str(folder),
                        fix="free some space, or choose a folder that can be written") from error
