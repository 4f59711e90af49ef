"""What ``PPOTrainer.generate`` takes and returns."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ppocli.config.schema import GenerationConfig, TrainConfig
from ppocli.errors import ConfigError

if TYPE_CHECKING:
    from ppocli.ppo.rollout import Chunk


@dataclass(frozen=True)
class Batch:
    """B samples of the policy, for ``PPOTrainer.step``."""

    prompts: list[str]
    """as a reward sees them"""
    responses: list[str]
    """without special tokens, trimmed at a stop sequence"""
    prompt_ids: list[list[int]]
    response_ids: list[list[int]]
    """through the token that ended the response"""
    logprobs: list[list[float]]
    """of each response token under the policy"""
    values: list[list[float]]
    """of the state before each response token; zeros where the decoding pass computes none"""
    finished: list[bool]
    """whether a stop token or stop sequence ended the response"""
    columns: dict[str, list[Any]]
    """what came with the prompts beside their text"""
    chunks: "tuple[Chunk, ...]"
    """the same as tensors, for ``step``"""
    made_at: int
    """steps that the policy had made"""
    temperature: float
    """that the responses were sampled with"""

    def __len__(self) -> int:
        return len(self.responses)

    def __getitem__(self, index: Any) -> Any:
        raise ConfigError("This is a batch, no list of responses.", where="PPOTrainer.generate",
                          fix="batch.responses or batch.response_ids; or, for tensors as TRL's, "
                          "generate(queries, return_prompt=False)")


def called(cfg: TrainConfig, arguments: Mapping[str, Any]
           ) -> tuple[GenerationConfig, list[int] | None]:
    """Generation arguments of one call as ``generation``, and the ids that end a response if they
    say so.

    Args:
        arguments: of :data:`ppocli.evaluation.player.CHANGEABLE`; or as TRL's scripts have them for
            transformers' ``generate``: ``top_k=0.0``, ``min_length=-1``, ``pad_token_id``,
            ``eos_token_id`` (-1: none).

    Raises:
        ConfigError: an unknown argument, or a value that makes no sense.
    """
    from ppocli.evaluation.player import changed_sampling

    changes = {**arguments}
    changes.pop("pad_token_id", None)  # lengths say where a response ends
    if (changes.pop("min_length", None) or 0) > 0:
        raise ConfigError("min_length counts the prompt's tokens too.", where="min_length",
                          fix="min_new_tokens=N counts those of the response")
    if isinstance(changes.get("top_k"), float) and changes["top_k"].is_integer():
        changes["top_k"] = int(changes["top_k"])
    ends = changes.pop("eos_token_id", None)
    if "eos_token_id" in arguments:
        ends = [i for i in (ends if isinstance(ends, list) else [ends]) if i is not None and i >= 0]
    return changed_sampling(cfg, changes, draws=True) if changes else cfg.generation, ends
