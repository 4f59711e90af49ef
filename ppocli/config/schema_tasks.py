"""The words of trainings on a data set, ``ppocli sft`` and ``ppocli reward-model``: their data,
and what they have in place of ``ppo``."""

from dataclasses import dataclass
from typing import Optional

from ppocli.config.schema_ppo import ExamplesConfig, OptimizerConfig, SchedulerConfig, key


@dataclass
class DataConfig(ExamplesConfig):
    val: Optional[str] = key(None, "what evaluations are made on: a path as of data.path, or the "
                             "share of the rows that is held back, such as 0.05 (drawn by seed)")


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
