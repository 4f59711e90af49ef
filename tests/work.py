"""Counts of a training step's work, taken from the operations that torch is told to do.

Which layer works for whom shows in the shapes alone: the tests' models have dimensions that no
number of tokens or rows of theirs comes near. So the product has no counters, and how it lays out
its passes, or enters a model half-way up, makes no difference to what is counted.
"""

from collections import Counter, defaultdict
from pathlib import Path
from typing import Any, NamedTuple

import torch
from helpers import save_lm, write_prompts
from torch.utils._python_dispatch import TorchDispatchMode

VOCABULARY, HIDDEN, INNER, LAYERS = 523, 256, 384, 3
"""of the models; beyond any number of positions that goes through them at once"""
_MATMULS = ("mm", "addmm", "linear", "_linear_pointwise", "mkldnn_linear", "_addmm_activation")
_OTHERS = ("bmm", "baddbmm", "_reorder_linear_weight")
"""matrix products of attention, which are not counted: their shapes are not those of a layer; and
weights laid out anew, which is no product"""


def save_work_lm(folder: Path) -> Path:
    """A GPT-2 of the shape that is counted, and prompts of several lengths, below ``folder``."""
    save_lm(folder / "lm", vocab_size=VOCABULARY, n_embd=HIDDEN, n_inner=INNER, n_layer=LAYERS)
    write_prompts(folder / "prompts.jsonl", ["the", "the film", "i saw it", "this plot was not so",
                                             "we", "you hated the film and the actor"])
    return folder


class _Product(NamedTuple):
    """[rows, inner] x [inner, out]."""

    rows: int
    inner: int
    out: int


def _product(name: str, args: tuple[Any, ...]) -> _Product:
    if name in ("addmm", "_addmm_activation"):
        args = args[1:]
    left, right = args[0], args[1]
    out = right.shape[1] if name in ("mm", "addmm", "_addmm_activation") else right.shape[0]
    return _Product(left.numel() // left.shape[-1], left.shape[-1], out)


class Work(TorchDispatchMode):
    """Counts what is done inside, and books it to a phase at each :meth:`mark`, in positions:

    ``embedded``: looked up in an embedding of tokens. ``layers``: through a layer, every layer for
    itself. ``head``: with logits; ``head_again``: in a backward pass, once more. ``values``:
    through the value head. ``layers_back``, ``head_back``: gradients of states that came through
    these. ``embedding_grads``, ``head_grads``,
    ``layer_grads``: that gradients of the weights were made from. ``steps``: of an optimizer, for
    each of its groups.
    """

    def __init__(self) -> None:
        super().__init__()
        self.phases: dict[str, Counter[str]] = defaultdict(Counter)
        self.passes: dict[str, list[int]] = defaultdict(list)
        """positions of each embedding of tokens, by phase"""
        self._now: Counter[str] = Counter()
        self._passes: list[int] = []

    def mark(self, name: str) -> None:
        """What was done since the last mark belongs to this phase."""
        self.phases[name] += self._now
        self.passes[name] += self._passes
        self._now, self._passes = Counter(), []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if name in _MATMULS:
            self._count(_product(name, args))
        elif name == "embedding" and args[0].shape == (VOCABULARY, HIDDEN):
            self._now["embedded"] += args[1].numel()
            self._passes.append(args[1].numel())
        elif name == "embedding_dense_backward" and args[2] == VOCABULARY:
            self._now["embedding_grads"] += args[1].numel()
        elif "adam" in name:
            self._now["steps"] += 1
        elif ("linear" in name or "mm" in name or "matmul" in name) and name not in _OTHERS:
            raise AssertionError(f"{func} is a matrix product that is not counted")
        return func(*args, **(kwargs or {}))

    def _count(self, one: _Product) -> None:
        back = torch._C._current_graph_task_id() != -1
        kind = {(INNER, HIDDEN): "layers", (HIDDEN, VOCABULARY): "head",
                (HIDDEN, 2 * HIDDEN): "values"}.get((one.inner, one.out))
        if kind is not None and not back:
            self._now[kind] += one.rows
        if not back:
            return
        if kind == "head":
            self._now["head_again"] += one.rows
        # of the product that a layer ends with: gradients of its input, and of its weights
        if (one.inner, one.out) == (HIDDEN, INNER):
            self._now["layers_back"] += one.rows
        elif (one.inner, one.out) == (VOCABULARY, HIDDEN):
            self._now["head_back"] += one.rows
        elif {one.rows, one.out} == {HIDDEN, INNER}:
            self._now["layer_grads"] += one.inner
        elif {one.rows, one.out} == {HIDDEN, VOCABULARY}:
            self._now["head_grads"] += one.inner
