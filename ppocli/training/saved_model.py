"""What is trained as a plain Hugging Face folder: weights, configuration, tokenizer."""

import copy
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from ppocli.models.loading.load_adapters import (
    Adapter,
    adapter_tensors,
    describe_adapter,
    merged_tensors,
)
from ppocli.models.trunk import virtual_tokens
from ppocli.runs.model_files import ADAPTER_WEIGHTS

Tensors = dict[str, torch.Tensor]
PROMPT_ENCODER = "prompt_encoder"


@dataclass(frozen=True, slots=True)
class SavedModel:
    """How a model of transformers, or an adapter of PEFT on one, is written. Of all this only the
    weights ever change."""

    lm: Any
    config: Any
    """the model's configuration as it came"""
    generation_config: Any
    """for whoever samples from it later; None of a model that isn't sampled from"""
    tokenizer: Any
    adapter: Adapter | None = None
    merges: bool = False
    """whether :meth:`write` merges the adapter into its base"""

    def tensors(self) -> Tensors:
        """The state dict of the model, or its adapter's tensors as PEFT names them."""
        return self.lm.state_dict() if self.adapter is None else adapter_tensors(self.adapter)

    def prompt_encoders(self) -> dict[str, torch.nn.Module]:
        """What trained virtual tokens are made by; PEFT's own file holds the result, from which a
        projection can't be found again."""
        virtual = virtual_tokens(self.lm)
        return {} if virtual is None else {PROMPT_ENCODER: virtual.prompt_encoder}

    def write(self, folder: Path, weights: Tensors | None = None) -> None:
        """The whole folder, as transformers would write it; of an adapter, as PEFT would.

        Args:
            weights: as of :meth:`tensors`, where the modules don't hold them whole.
        """
        if self.merges and self.adapter is not None:
            replace(self, adapter=None).write(folder, merged_tensors(self.adapter))
            return
        self.write_weights(folder, weights)
        self.describe(folder)

    def write_weights(self, folder: Path, weights: Tensors | None = None) -> None:
        """The weights alone; see :meth:`write`."""
        folder.mkdir(parents=True, exist_ok=True)
        if self.adapter is None:
            self.lm.save_pretrained(folder, safe_serialization=True,
                                    state_dict=None if weights is None else dict(weights))
        else:
            save_file(self.tensors() if weights is None else weights, folder / ADAPTER_WEIGHTS,
                      metadata={"format": "pt"})

    def describe(self, folder: Path) -> None:
        """What goes with the weights: configuration as it came or PEFT's, tokenizer, and generation
        config."""
        if self.adapter is None:
            config = copy.deepcopy(self.config)
            config.architectures = [type(self.lm).__name__]
            config.dtype = str(next(self.lm.parameters()).dtype).removeprefix("torch.")
            config.save_pretrained(folder)
        else:
            describe_adapter(self.adapter, folder)
        self.tokenizer.save_pretrained(folder)
        if self.generation_config is not None:
            self.generation_config.save_pretrained(folder)
