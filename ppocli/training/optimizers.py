"""The optimizers over what trains, the policy and separately the value function, and fp32 master
copies of weights that are stored in bf16.

bf16 has 8 significant bits: a step below 1/512 of a weight would be rounded away, as nearly all of
PPO's are. A master copy is the weight together with the 16 bits that rounding took from it, which
lie in the optimizer's state: 4 bytes for both (Kalamkar et al. 2020, arXiv 2005.04680, section
VII, "Split-SGD-BF16").
"""

from collections import defaultdict
from typing import Any

import torch

from ppocli.config import tasks
from ppocli.config.schema_training import OPTIMIZER_KEYS, OptimizerConfig

LOW = "low"
"""slot of the optimizer's state: int16, what the bits of a bf16 weight lack to those of fp32"""
ROLES = ("policy", "value")
"""of the groups of parameters that PPO trains, each with a schedule of its own"""


def named_trainable(policy: torch.nn.Module) -> dict[str, torch.nn.Parameter]:
    """Trainable parameters by name, tied ones once; the order is the model's own."""
    return {name: p for name, p in policy.named_parameters() if p.requires_grad}


def build_optimizer(policy: torch.nn.Module, updates: tasks.Updates) -> torch.optim.Optimizer:
    """The optimizer over the trainable parameters, the value function's in a group of its own, or
    in an optimizer of its own where that is of another kind.

    ``adafactor`` is torch's (Shazeer and Stern 2018, arXiv 1804.04235), whose steps are relative to
    the scale of each weight; ``adamw_8bit`` is bitsandbytes', which keeps the state of weights of
    4096 numbers and more in 8 bits.

    Args:
        updates: the section of the configuration that says how updates are made.

    Raises:
        InputError: bitsandbytes is asked for and missing.
    """
    policy_weights, critic = _by_role(policy)
    settings = tasks.optimizers_of(updates)
    groups = [_group(parameters, cfg, role) for parameters, cfg, role in zip(
        (policy_weights, critic), settings, ROLES, strict=False) if parameters]
    if settings[0].name == settings[-1].name or len(groups) == 1:
        parts = [_optimizer(settings[0], groups)]
    else:
        parts = [_optimizer(cfg, [group]) for cfg, group in zip(settings, groups, strict=True)]
    if any(p.dtype == torch.bfloat16 for p in (*policy_weights, *critic)):
        return MasterWeights(parts)
    return parts[0] if len(parts) == 1 else JointOptimizer(parts)


def _by_role(policy: torch.nn.Module) -> list[list[torch.nn.Parameter]]:
    """The trainable parameters of each of :data:`ROLES`."""
    return [[p for name, p in named_trainable(policy).items()
             if name.startswith("value_") == (role == "value")] for role in ROLES]


def _group(parameters: list[torch.nn.Parameter], cfg: OptimizerConfig, role: str) -> dict[str, Any]:
    return {"params": parameters, "lr": cfg.lr, "base_lr": cfg.lr, "role": role,
            "weight_decay": cfg.weight_decay,
            **{name: getattr(cfg, name) for name in OPTIMIZER_KEYS[cfg.name]}}


def _optimizer(cfg: OptimizerConfig, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    if cfg.name == "adafactor":
        return torch.optim.Adafactor(groups)
    if cfg.name == "adamw_8bit":
        tasks.require_optimizer(cfg)
        from bitsandbytes.optim import AdamW8bit

        return AdamW8bit(groups)
    kinds: dict[str, Any] = {"sgd": torch.optim.SGD, "adam": torch.optim.Adam,
                             "adamw": torch.optim.AdamW}
    return kinds[cfg.name](groups, fused=True)


class JointOptimizer(torch.optim.Optimizer):
    """Optimizers, perhaps of different kinds, as one: they share the mapping of state and list
    their groups together."""

    def __init__(self, parts: list[torch.optim.Optimizer]) -> None:
        self.parts = parts
        super().__init__([group for part in parts for group in part.param_groups], {})
        self._link()

    def _link(self) -> None:
        self.param_groups = [group for part in self.parts for group in part.param_groups]
        self.state = defaultdict(dict)
        for part in self.parts:
            self.state.update(part.state)
            part.state = self.state

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Step with all."""
        for part in self.parts:
            part.step(closure)

    def state_dict(self) -> dict[str, Any]:
        """Of all, in their order."""
        return {"parts": [part.state_dict() for part in self.parts]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """What :meth:`state_dict` gave."""
        for part, state in zip(self.parts, state_dict["parts"], strict=True):
            part.state = defaultdict(dict)
            part.load_state_dict(state)
        self._link()


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


class MasterWeights(JointOptimizer):
    """Other optimizers, which see fp32 weights and gradients in place of bf16 ones, one at a
    time."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Step fp32 weights as they are, bf16 ones by their master copies."""
        groups = [(group, group["params"]) for group in self.param_groups]
        for group in self.param_groups:
            group["params"] = []
        for group, parameters in groups:
            group["params"] = [p for p in parameters if p.dtype == torch.float32]
            super().step()
            for parameter in parameters:
                if parameter.dtype != torch.float32 and parameter.grad is not None:
                    self._step_one(group, parameter)
            group["params"] = []
        for group, parameters in groups:
            group["params"] = parameters

    def _step_one(self, group: dict[str, Any], parameter: torch.nn.Parameter) -> None:
        state = dict(self.state.pop(parameter, {}))
        low = state.pop(LOW, None)
        whole = parameter.float() if low is None else joined(parameter, low)
        master = torch.nn.Parameter(whole, requires_grad=False)
        # one large tensor in fp32 is much: what isn't needed any more makes room for it
        master.grad, parameter.grad = parameter.grad.float(), None  # type: ignore[union-attr]
        if state:
            self.state[master] = state
        group["params"] = [master]
        super().step()
        master.grad = None
        high, low = split(master.data)
        parameter.copy_(high)
        self.state[parameter] = {**self.state.pop(master, {}), LOW: low}
