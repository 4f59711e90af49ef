"""The words of trainings on a data set, ``ppocli sft`` and ``ppocli reward-model``: their data,
and what they have in place of ``ppo``."""

from dataclasses import dataclass
from typing import Any, Optional

from ppocli.config.schema_ppo import OptimizerConfig, SchedulerConfig, key


@dataclass
class DataConfig:
    path: Optional[str] = key(None, "json, jsonl, csv, parquet or txt file, a folder saved by "
                              "`datasets`, or a Hub data set; its columns say what it holds")
    name: Optional[str] = key(None, "Hub data set configuration")
    split: str = key("train", "split of the data set; splits can be added: train+test")
    val: Optional[str] = key(None, "what evaluations are made on: a path as of data.path, or the "
                             "share of the rows that is held back, such as 0.05 (drawn by seed)")
    columns: dict[str, Any] = key({}, "other names of columns: data.columns.completion=summary "
                                  "reads the completion from the column summary")
    limit: Optional[int] = key(None, "use only the first n rows", ge=1)
    max_length: Optional[int] = key(None, "longest example in tokens (default: what the model "
                                    "reads); longer ones are cut, longer pairs dropped", ge=2)
    train_on: str = key("auto", "the tokens that count: the 'completion' after a prompt, every "
                        "turn of the 'assistant', or 'all' (auto: completion where there is a "
                        "prompt, assistant in conversations, else all)",
                        choices=("auto", "completion", "assistant", "all"))
    chat: bool = key(False, "render plain prompts with the tokenizer's chat template, as the turn "
                     "of a user (conversations always are)")
    template: Optional[str] = key(None, "text with {prompt} and {column} placeholders that becomes "
                                  "the prompt")
    packing: bool = key(True, "lay the examples of a pass out in one row without padding, each "
                        "attending to itself alone, where the model allows it; never changes the "
                        "gradient")
    shuffle: bool = key(True, "draw a new order every epoch from the seed")


@dataclass
class DataOptimizerConfig(OptimizerConfig):
    lr: float = key(2e-5, "learning rate (adafactor: relative to the scale of each weight)", ge=0)


@dataclass
class UpdatesConfig:
    """How long to train on a data set, and in which steps."""

    epochs: Optional[int] = key(None, "passes over the data (default: 1)", ge=1)
    num_updates: Optional[int] = key(None, "optimizer updates, in place of epochs", ge=1)
    mini_batch_size: int = key(32, "examples (of a reward model: pairs) per optimizer update", ge=1)
    micro_batch_size: Optional[int] = key(None, "examples or pairs per forward/backward pass "
                                          "(default: mini_batch_size); never changes the gradient",
                                          ge=1)
    micro_batch_tokens: Optional[int] = key(None, "tokens per forward/backward pass at most, where "
                                            "one example alone has no more (default: no limit); "
                                            "never changes the gradient", ge=1)
    max_grad_norm: Optional[float] = key(1.0, "gradient norm clip (null: none)", gt=0)
    max_nonfinite: int = key(3, "stop after this many non-finite updates in a row", ge=1)
    optimizer: DataOptimizerConfig = key(DataOptimizerConfig, "the optimizer")
    scheduler: SchedulerConfig = key(SchedulerConfig, "the learning-rate schedule, over updates")


@dataclass
class SFTConfig(UpdatesConfig):
    neftune: Optional[float] = key(None, "noise on the embeddings while training, its largest "
                                   "value times sqrt(tokens * width) (NEFTune's alpha, such as 5)",
                                   gt=0)
    eval_samples: int = key(8, "responses to prompts of data.val that evaluations show (0: none)",
                            ge=0)


@dataclass
class RewardModelConfig(UpdatesConfig):
    center_coef: float = key(0.0, "weight of (chosen + rejected score)^2, which holds scores "
                             "around 0", ge=0)
