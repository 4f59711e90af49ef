"""fp32 master copies of weights that are stored in bf16.

bf16 has 8 significant bits: a step below 1/512 of a weight would be rounded away, as nearly all of
PPO's are. A master copy is the weight together with the 16 bits that rounding took from it, which
lie in the optimizer's state: 4 bytes for both (Kalamkar et al. 2020, arXiv 2005.04680, section
VII, "Split-SGD-BF16").
"""

import torch

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
