"""How a key is declared, and the keys of what is trained: policy, value function, reference."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Optional

from omegaconf import MISSING


def key(default: Any, doc: str, *, choices: tuple[str, ...] | None = None, ge: float | None = None,
        gt: float | None = None, le: float | None = None, lt: float | None = None,
        each: type | None = None, import_path: bool = False) -> Any:
    """A dataclass field with its documentation and its allowed values.

    Bounds are inclusive (``ge``, ``le``) or exclusive (``gt``, ``lt``); for a list they hold for
    each element. ``None`` is allowed exactly where the type is ``Optional``.

    Args:
        each: type of a value that may be one or a list of several, which OmegaConf's own types
            can't say: the field's type is then ``Any``, and null is allowed.
        import_path: beside the ``choices``, an import path names something of the user's own.
    """
    metadata = {"doc": doc, "choices": choices, "ge": ge, "gt": gt, "le": le, "lt": lt,
                "each": each, "import_path": import_path}
    if isinstance(default, (list, dict)):
        return field(default_factory=lambda: type(default)(default), metadata=metadata)
    if isinstance(default, type):
        return field(default_factory=default, metadata=metadata)
    return field(default=default, metadata=metadata)


@dataclass
class ReferenceConfig:
    kind: str = key("auto", "frozen starting policy that the KL is measured against: a 'copy', "
                    "'shared' with the policy's frozen layers, or the policy with its 'adapter' "
                    "switched off (auto: adapter with model.peft, shared where "
                    "model.num_layers_unfrozen freezes some, else copy); 'none' trains without "
                    "a KL term", choices=("auto", "copy", "shared", "adapter", "none"))
    path: Optional[str] = key(None, "folder or Hub name of another reference than the model that "
                              "the policy starts from; it has the same tokenizer")
    offload: bool = key(False, "keep the reference in host memory while it is not run")
    device: Optional[str] = key(None, "kind=copy: run the reference elsewhere: cpu, cuda:1, ... "
                                "(default: beside the policy)")
    shard: Optional[bool] = key(None, "keep a part of it on each process (default: under ZeRO 3)")


@dataclass
class ValueConfig:
    kind: str = key("head", "a 'head' on the policy's trunk, a 'branch' with top layers of its "
                    "own, or a 'model' of its own", choices=("head", "branch", "model"))
    path: Optional[str] = key(None, "kind=model: folder or Hub name, such as the reward model's "
                              "(default: model.path)")
    num_layers_unfrozen: int = key(-1, "kind=branch: how many top layers of its own; kind=model: "
                                   "train only the top k layers (-1: all)", ge=-1)


@dataclass
class ModelConfig:
    path: str = key(MISSING, "a folder, a Hub name, or builtin:reviews / builtin:randomwalks")
    revision: Optional[str] = key(None, "branch, tag or commit of a Hub model")
    arch: str = key("auto", "a 'causal' model that continues the prompt, or an encoder-decoder "
                    "('seq2seq') that answers it (auto: what the model's files say)",
                    choices=("auto", "causal", "seq2seq"))
    tokenizer_path: Optional[str] = key(None, "tokenizer folder or Hub name (default: model.path)")
    dtype: Optional[str] = key(None, "storage type of what never trains: the reference "
                               "and, with model.peft, the policy's base (default: "
                               "hardware.precision)", choices=("fp32", "bf16"))
    peft: Optional[dict[str, Any]] = key({}, "train an adapter on a frozen base: type (lora, "
                                         "prefix, prompt) and fields of that config of PEFT")
    quantization: Optional[str] = key(None, "hold the frozen base under model.peft in 8 or 4 bits "
                                      "(bitsandbytes, needs CUDA)", choices=("8bit", "4bit"))
    num_layers_unfrozen: int = key(-1, "train only the top k layers (-1: all)", ge=-1)
    gradient_checkpointing: bool = key(False, "recompute activations in the backward pass")
    attn_implementation: Optional[str] = key(None, "sdpa, eager, flash_attention_2, ... "
                                             "(default: transformers' choice)")
    trust_remote_code: bool = key(False, "run Python code that the model's repository ships")
    value: ValueConfig = key(ValueConfig, "the value function")
    reference: ReferenceConfig = key(ReferenceConfig, "the reference policy")


def reference_kind(model: ModelConfig) -> str:
    """``copy``, ``shared``, ``adapter`` or ``none``: what ``model.reference.kind`` comes to."""
    if model.reference.kind != "auto":
        return model.reference.kind
    if model.reference.path is not None:
        return "copy"
    if model.peft:
        return "adapter"
    return "shared" if model.num_layers_unfrozen >= 0 else "copy"
