"""The policy: a causal language model and, unless the advantages need none, its value function,
which may have layers of its own: a branch that leaves the policy's trunk near its top, a second
adapter on the policy's frozen base, or a whole second model."""

import copy
import logging
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn

from ppocli.distributed.deepspeed_internals import whole_shape
from ppocli.models import trunk as stacks
from ppocli.models.head import HeadWeights, OtherHead, TokenFigures, full_kl, token_logprobs
from ppocli.models.layout import RowBatch, SequenceBatch
from ppocli.models.loading.load_adapters import ValueAdapter, enable_adapter
from ppocli.models.trunk import (
    SplitPoint,
    has_encoder,
    response_hidden,
    swapped_tensors,
    trained_split,
)

log = logging.getLogger("ppocli")


class ValueHead(nn.Module):
    """Two-layer perceptron on the trunk's final hidden state, in fp32; starts at value 0.

    The output layer starts at zero (openai/lm-human-preferences), so that the first advantages are
    the rewards themselves and not the noise of a random critic.
    """

    def __init__(self, hidden_size: int, generator: torch.Generator) -> None:
        super().__init__()
        self.inner = nn.Linear(hidden_size, 2 * hidden_size)
        self.outer = nn.Linear(2 * hidden_size, 1)
        with torch.no_grad():
            bound = hidden_size**-0.5
            self.inner.weight.uniform_(-bound, bound, generator=generator)
            for tensor in (self.inner.bias, self.outer.weight, self.outer.bias):
                tensor.zero_()

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """[..., D] hidden states -> [...] values, fp32 whatever the compute type."""
        with torch.autocast(hidden.device.type, enabled=False):
            return self.outer(torch.relu(self.inner(hidden.float()))).squeeze(-1)


def build_value_head(lm: Any, seed: int) -> ValueHead:
    """A value head that fits the trunk of ``lm``, the same for the same seed."""
    width = whole_shape(lm.get_output_embeddings().weight)[1]
    return ValueHead(width, torch.Generator().manual_seed(seed))


class ScoreHead(nn.Module):
    """The linear layer of a reward model as a value head, so that values start as its scores."""

    def __init__(self, score: nn.Linear) -> None:
        super().__init__()
        self.outer = score

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """[..., D] hidden states -> [...] values, fp32 whatever the compute type."""
        with torch.autocast(hidden.device.type, enabled=False):
            return self.outer(hidden.float()).squeeze(-1)


class ValueBranch(nn.Module):
    """Own copies of the policy's top layers and of what follows them, fed by the layer below (trlX
    ``num_value_layers_unfrozen``). Gradients flow on into those of the policy's layers that train.

    Args:
        lm: the policy's model; the copies start as its layers are.
        num_layers: how many.

    Raises:
        ValueError: the model has no plain stack of layers, or no layer would be left below.
    """

    def __init__(self, lm: Any, num_layers: int) -> None:
        super().__init__()
        if has_encoder(lm):
            raise ValueError("a branch can't leave the decoder of an encoder-decoder")
        stack = stacks.layer_stack(lm)
        if not 0 < num_layers < len(stack):
            raise ValueError(f"a branch of {num_layers} layers does not fit a stack of "
                             f"{len(stack)}: it needs one below it")
        self.split = stacks.split_at(lm, len(stack) - num_layers)
        self.layers = nn.ModuleList(copy.deepcopy(layer) for layer in list(stack)[-num_layers:])
        owner = lm.get_submodule(stacks.stack_path(lm).rpartition(".")[0])
        order = stacks.modules_run(lm)
        after = order[order.index(stack[-1]) + 1:]
        self.tail = nn.ModuleDict({name: copy.deepcopy(module)
                                   for name, module in owner.named_children()
                                   if module in after and any(True for _ in module.parameters())})
        self.requires_grad_(True)

    def forward(self, lm: Any, batch: SequenceBatch, shared: list[torch.Tensor]) -> torch.Tensor:
        """[N, D] states that a value head reads, at the positions that predict the response tokens.

        Args:
            lm: the policy's model.
            shared: what entered the layer of :attr:`split` in its pass over this batch.
        """
        path = stacks.stack_path(lm)
        modules: dict[str, nn.Module] = {f"{path}.{self.split.layer + i}": layer
                                         for i, layer in enumerate(self.layers)}
        parent = path.rpartition(".")[0]
        modules |= {f"{parent}.{name}".strip("."): module for name, module in self.tail.items()}
        return response_hidden(self.split.resumed(lm, shared[-1], modules), batch)


class ValueModel(nn.Module):
    """A trunk of its own, which sees the same tokens as the policy's."""

    split = None

    def __init__(self, lm: Any) -> None:
        super().__init__()
        self.lm = lm

    def forward(self, lm: Any, batch: SequenceBatch, shared: list[torch.Tensor]) -> torch.Tensor:
        """As of :class:`ValueBranch`."""
        return response_hidden(self.lm, batch)


class Policy(nn.Module):
    """A causal LM and its value function; one ``forward`` serves scoring and training.

    Everything of the value function has a name that begins with ``value_``. Where only top layers
    train, ``split`` says where they begin, and batches can bring what enters there.

    Args:
        lm: a transformers causal LM whose logits are ``output_embeddings(trunk(x))``.
        value_head: from hidden states to values; None where nothing asks for values.
        value_trunk: makes the hidden states for ``value_head``; None takes those of the policy's
            own trunk.
    """

    def __init__(self, lm: Any, value_head: ValueHead | ScoreHead | None,
                 value_trunk: ValueBranch | ValueModel | ValueAdapter | None = None) -> None:
        super().__init__()
        self.lm, self.value_head, self.value_trunk = lm, value_head, value_trunk
        self.split: stacks.SplitPoint | None = None

    @property
    def values_while_decoding(self) -> bool:
        """Whether the states that a token is sampled from give its value too."""
        return self.value_head is not None and self.value_trunk is None

    @property
    def values_apart(self) -> bool:
        """Whether values come from a pass of their own, which needs nothing of the policy's."""
        return self.value_trunk is not None and self.value_trunk.split is None

    def trunk(self, batch: SequenceBatch) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """[N, D] states that predict the response tokens, and what values are computed from."""
        lm = self._entered(batch)
        split = None if self.value_trunk is None else self.value_trunk.split
        with stacks.inputs_at(split, self.lm) as shared:
            return response_hidden(lm, batch), shared

    def _entered(self, batch: SequenceBatch) -> Any:
        """The model as a pass over the batch enters it: at the split, if the batch brings that."""
        if batch.frozen_states is None or self.split is None:
            return self.lm
        return self.split.resumed(self.lm, batch.frozen_states)

    def values(self, batch: SequenceBatch, hidden: torch.Tensor | None,
               shared: list[torch.Tensor]) -> torch.Tensor | None:
        """[N] values of the batch's response tokens, fp32, from what :meth:`trunk` returned for it;
        None and nothing will do where the value function runs :attr:`values_apart`."""
        if self.value_head is None:
            return None
        if self.value_trunk is not None:
            lm = self._entered(batch) if self.values_apart else self.lm
            hidden = self.value_trunk(lm, batch, shared)
        return self.value_head(hidden)

    def forward(self, batch: SequenceBatch, *, temperature: float, want_entropy: bool = False,
                value_only: bool = False, want_values: bool = True,
                reference: OtherHead | None = None, all_rows: bool = False) -> TokenFigures:
        """Logprobs, values and (on demand) entropies of the batch's response tokens, and the KL to
        the ``reference`` over the whole vocabulary. With ``value_only`` logprobs and the policy's
        states carry no gradient; with ``all_rows`` the output's rows without a token count too."""
        with torch.set_grad_enabled(torch.is_grad_enabled() and not value_only):
            hidden, shared = self.trunk(batch)
            figures = token_logprobs(
                hidden, HeadWeights.of(self.lm, all_rows=all_rows), batch.targets,
                temperature=temperature, want_entropy=want_entropy, other=reference)
        return figures._replace(
            values=self.values(batch, hidden, shared) if want_values else None)


class Reference(Protocol):
    """Yields a causal LM to run; which one may share its trunk with the policy."""

    def view(self, policy_lm: Any) -> AbstractContextManager[Any]:
        """The reference as a model, for passes without gradients.

        Args:
            policy_lm: the policy's model, which must not be run meanwhile.
        """

    @property
    def split(self) -> SplitPoint | None:
        """Where a pass of the :meth:`view` can start from what entered that layer in the policy's
        pass over the same batch; None where nothing is shared."""


@dataclass(frozen=True, slots=True)
class CopyReference:
    """A model of its own."""

    lm: Any
    device: torch.device
    """where it is run"""
    offload: bool = False
    """whether it lies in host memory while it isn't"""
    split: SplitPoint | None = None

    def view(self, policy_lm: Any) -> AbstractContextManager[Any]:
        """As :class:`Reference`."""
        return self._moved() if self.offload else nullcontext(self.lm)

    @contextmanager
    def _moved(self) -> Iterator[Any]:
        on_device = {name: tensor.data.to(self.device, non_blocking=True) for name, tensor in
                     (*self.lm.named_parameters(), *self.lm.named_buffers())}
        with swapped_tensors(self.lm, on_device):
            yield self.lm


@torch.no_grad()
def follow(reference: CopyReference, policy_lm: Any, alpha: float) -> None:
    """Move a reference to ``alpha * policy + (1 - alpha) * reference``, weight by weight: with 1 a
    reset (ProRL, Liu et al. 2025, arXiv 2505.24864), below it TR-DPO's soft update (Gorbatovski et
    al. 2024, arXiv 2404.09656), which is TRL's ``ref_model_mixup_alpha``."""
    now = dict(policy_lm.named_parameters())
    for name, parameter in reference.lm.named_parameters():
        parameter.lerp_(now[name].to(parameter), alpha)


@dataclass(frozen=True, slots=True)
class SharedReference:
    """The policy's own frozen trunk, and copies of the few tensors that train (trlX's hydra)."""

    frozen: dict[str, torch.Tensor]
    """parameters that train as they were at the start, by their names in the causal LM"""
    split: SplitPoint | None
    """the first layer that trains: policy and reference are the same before it"""

    @contextmanager
    def view(self, policy_lm: Any) -> Iterator[Any]:
        """As :class:`Reference`."""
        device = next(policy_lm.parameters()).device
        here = {name: tensor.to(device) for name, tensor in self.frozen.items()}
        with swapped_tensors(policy_lm, here):
            yield policy_lm


@dataclass(frozen=True, slots=True)
class AdapterReference:
    """The policy's own model with its adapter switched off: nothing is held twice."""

    split: SplitPoint | None = None

    @contextmanager
    def view(self, policy_lm: Any) -> Iterator[Any]:
        """As :class:`Reference`."""
        enable_adapter(policy_lm, False)
        try:
            yield policy_lm
        finally:
            enable_adapter(policy_lm, True)


@torch.no_grad()
def share_trunk(lm: Any, *, offload: bool = False) -> SharedReference:
    """A reference that shares what is frozen of a policy that has not been trained yet.

    Raises:
        ValueError: a pass from the first trained layer on does not give what a whole pass gives, so
            that the model's layers are not a plain sequence.
    """
    frozen = {name: p.detach().to("cpu" if offload else p.device, copy=True)
              for name, p in lm.named_parameters() if p.requires_grad}
    return SharedReference(frozen, trained_split(lm))


# What they say of sampled responses ---------------------------------------------------------------

@dataclass(frozen=True, slots=True)
class Scored:
    """What policy or reference say of the N tokens of a :class:`RowBatch`; None what wasn't asked
    for."""

    logprobs: torch.Tensor | None
    """[N]"""
    states: torch.Tensor | None
    """[N, D] final ones"""
    frozen_states: torch.Tensor | None
    """[b, T, D] what entered the layer where passes are split"""
    values: torch.Tensor | None = None
    """[N] of the policy"""
    full_kl: torch.Tensor | None = None
    """[N] from the policy to the reference, over the whole vocabulary"""


def score_policy(policy: Policy, one: RowBatch, *, temperature: float, want_logprobs: bool,
                 want_values: bool, keep_hidden: bool, split: stacks.SplitPoint | None = None
                 ) -> Scored:
    """What is wanted of the policy's logprobs, values and final states, and no more.

    Args:
        split: the layer whose inputs are kept.
    """
    hidden, logprobs, shared = None, None, list[torch.Tensor]()
    with stacks.inputs_at(split, policy.lm) as frozen:
        if want_logprobs or keep_hidden or not policy.values_apart:
            hidden, shared = policy.trunk(one.batch)
    if want_logprobs and hidden is not None:
        logprobs = token_logprobs(hidden, HeadWeights.of(policy.lm), one.batch.targets,
                                  temperature=temperature).logprobs
    values = policy.values(one.batch, hidden, shared) if want_values else None
    return Scored(logprobs, hidden if keep_hidden else None, frozen[-1] if frozen else None, values)


def score_reference(reference: Reference, view: Any, one: RowBatch, *, temperature: float,
                    of_policy: OtherHead | None = None, frozen_states: torch.Tensor | None = None,
                    split: stacks.SplitPoint | None = None) -> Scored:
    """The reference's logprobs and states by its ``view`` as a model, on whichever device that is,
    and the KL over the whole vocabulary from the policy's states and head ``of_policy``, in whose
    place the view may have put the reference's. Where the reference is split as the policy is, it
    starts from ``frozen_states`` of the policy's pass; without them, they are kept at ``split``."""
    batch = one.batch.to(view.get_output_embeddings().weight.device)
    lm = view if frozen_states is None or reference.split is None else (
        reference.split.resumed(view, frozen_states))
    with stacks.inputs_at(split if frozen_states is None else None, view) as entering:
        states = response_hidden(lm, batch)
    head = HeadWeights.of(view)
    logprobs = token_logprobs(states, head, batch.targets, temperature=temperature).logprobs
    kl = None if of_policy is None else full_kl(of_policy.states, of_policy.head, states, head,
                                                temperature=temperature)
    return Scored(logprobs, states, entering[-1] if entering else frozen_states, full_kl=kl)


def frozen_split(policy: Policy) -> stacks.SplitPoint | None:
    """The split of a policy that trains its top layers only; None where all layers train, or a
    layer that must be run lies below."""
    try:
        split = stacks.trained_split(policy.lm)
    except ValueError:  # layers that are no plain sequence
        return None
    branch = policy.value_trunk
    if isinstance(branch, ValueBranch) and split and branch.split.layer < split.layer:
        return None
    return split
