"""A frozen base in 8 or 4 bits, under an adapter (Dettmers et al. 2023, QLoRA)."""

from __future__ import annotations

from typing import Any

import torch

from ppocli.config.schema import ModelConfig
from ppocli.errors import InputError


def quantized(cfg: ModelConfig) -> dict[str, Any]:
    """How transformers is asked for quantized weights, which it makes on the GPU.

    Raises:
        InputError: there is none.
    """
    if cfg.quantization is None:
        return {}
    if not torch.cuda.is_available():
        raise InputError(f"A {cfg.quantization} base needs a CUDA device, and none was found.",
                         where="model.quantization", fix="leave model.quantization out")
    from transformers import BitsAndBytesConfig

    how = (BitsAndBytesConfig(load_in_8bit=True) if cfg.quantization == "8bit" else
           BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4",
                              bnb_4bit_use_double_quant=True,
                              bnb_4bit_compute_dtype=torch.bfloat16))
    return {"quantization_config": how, "device_map": {"": torch.cuda.current_device()}}
