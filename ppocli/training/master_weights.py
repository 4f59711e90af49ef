"""fp32 master copies of weights that are stored in bf16.

bf16 has 8 significant bits: a step below 1/512 of a weight would be rounded away, as nearly all of
PPO's are. A master copy is the weight together with the 16 bits that rounding took from it, which
lie in the optimizer's state: 4 bytes for both (Kalamkar et al. 2020, arXiv 2005.04680, section
VII, "Split-SGD-BF16").
"""

from typing import Any

import torch
from torch import nn

LOW = "low"
"""slot of the optimizer's state: int16, what the bits of a bf16 weight lack to those of fp32"""


def split(master: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """A finite fp32 tensor rounded to bf16 (halves away from zero), and int16 what that lacks. The
    tensor is used up."""
    bits = master.view(torch.int32)
    high = (bits + 2**15).bitwise_right_shift_(16)
    weight = high.to(torch.int16).view(torch.bfloat16)
    return weight, bits.sub_(high.bitwise_left_shift_(16)).to(torch.int16)


def joined(weight: torch.Tensor, low: torch.Tensor) -> torch.Tensor:
    """The fp32 tensor that :func:`split` took apart, to the last bit."""
    bits = weight.view(torch.int16).to(torch.int32).bitwise_left_shift_(16)
    return bits.add_(low).view(torch.float32)


class MasterWeights(torch.optim.Optimizer):
    """Another optimizer, which sees fp32 weights and gradients in place of bf16 ones, one at a
    time. Groups and state are the other one's."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self.inner = inner
        super().__init__(inner.param_groups, {})
        self._link()

    def _link(self) -> None:
        self.param_groups, self.state = self.inner.param_groups, self.inner.state

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Step fp32 weights as they are, bf16 ones by their master copies."""
        groups = [(group, group["params"]) for group in self.param_groups]
        for group in self.param_groups:
            group["params"] = []
        for group, parameters in groups:
            group["params"] = [p for p in parameters if p.dtype == torch.float32]
            self.inner.step()
            for parameter in parameters:
                if parameter.dtype != torch.float32 and parameter.grad is not None:
                    self._step_one(group, parameter)
            group["params"] = []
        for group, parameters in groups:
            group["params"] = parameters

    def _step_one(self, group: dict[str, Any], parameter: nn.Parameter) -> None:
        own = dict(self.state.pop(parameter, {}))
        low = own.pop(LOW, None)
        whole = parameter.float() if low is None else joined(parameter, low)
        master = nn.Parameter(whole, requires_grad=False)
        # one large tensor in fp32 is much: what isn't needed any more makes room for it
        master.grad, parameter.grad = parameter.grad.float(), None  # type: ignore[union-attr]
        if own:
            self.state[master] = own
        group["params"] = [master]
        self.inner.step()
        master.grad = None
        high, low = split(master.data)
        parameter.copy_(high)
        self.state[parameter] = {**self.state.pop(master, {}), LOW: low}

    def state_dict(self) -> dict[str, Any]:
        """The other one's."""
        return self.inner.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """What :meth:`state_dict` gave."""
        self.inner.load_state_dict(state_dict)
        self._link()
