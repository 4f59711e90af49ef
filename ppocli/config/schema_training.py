"""How a key is declared, and those of what learns: sizes, losses, KL, optimizers, schedules and
examples, of PPO and of trainings on a data set (``ppocli sft``, ``ppocli reward-model``)."""

from dataclasses import dataclass, field
from typing import Any, Optional

from ppocli.ppo.advantages import ESTIMATORS
from ppocli.ppo.off_policy import LEVELS


def key(default: Any, doc: str, *, choices: tuple[str, ...] | None = None, ge: float | None = None,
        gt: float | None = None, le: float | None = None, lt: float | None = None,
        each: type | None = None, import_path: bool = False) -> Any:
    """A dataclass field with its documentation and its allowed values.

    Bounds are inclusive (``ge``, ``le``) or exclusive (``gt``, ``lt``); for a list they hold for
    each element. ``None`` is allowed exactly where the type is ``Optional``.

    Args:
        default: of a section what makes it, its class or a function.
        each: type of a value that may be one or a list of several, which OmegaConf's own types
            can't say: the field's type is then ``Any``, and null is allowed.
        import_path: beside the ``choices``, an import path names something of the user's own.
    """
    metadata = {"doc": doc, "choices": choices, "ge": ge, "gt": gt, "le": le, "lt": lt,
                "each": each, "import_path": import_path}
    if isinstance(default, (list, dict)):
        return field(default_factory=lambda: type(default)(default), metadata=metadata)
    if callable(default):
        return field(default_factory=default, metadata=metadata)
    return field(default=default, metadata=metadata)


@dataclass
class OptimizerConfig:
    name: str = key("adamw", "optimizer; adamw_8bit needs bitsandbytes (extra 8bit)",
                    choices=("adamw", "adamw_8bit", "adam", "sgd", "adafactor"))
    lr: float = key(1.41e-5, "learning rate (adafactor: relative to the scale of each weight)",
                    ge=0)
    betas: list[float] = key([0.9, 0.999], "decay rates of adamw, adamw_8bit and adam", ge=0, lt=1)
    eps: float = key(1e-8, "epsilon of adamw, adamw_8bit and adam", gt=0)
    momentum: float = key(0.0, "momentum of sgd", ge=0, lt=1)
    weight_decay: float = key(0.0, "weight decay: decoupled, or L2 with adam and sgd", ge=0)


@dataclass
class PPOOptimizerConfig(OptimizerConfig):
    value_lr: Optional[float] = key(None, "learning rate of the value function (default: lr)", ge=0)


SCHEDULE_ARGUMENTS = {
    "constant": (), "linear": (), "cosine": (), "cosine_with_restarts": ("num_cycles",),
    "polynomial": ("power",), "inverse_sqrt": ("timescale",),
    "warmup_stable_decay": ("num_decay_steps", "decay_type")}
"""by name of the schedule, what its ``kwargs`` may hold"""
SCHEDULES_IN_WORDS = {
    "constant_with_warmup": "; it is constant, with the key warmup_updates beside it",
    "cosine_with_min_lr": "; it is cosine, with the key min_lr_ratio beside it",
    "cosine_warmup_with_min_lr": "; it is cosine, with the keys warmup_updates and min_lr_ratio "
                                 "beside it"}
"""what transformers' other names stand for here"""


@dataclass
class SchedulerConfig:
    name: str = key("constant", "shape of the learning rate over updates",
                    choices=tuple(SCHEDULE_ARGUMENTS))
    warmup_updates: int = key(0, "updates of linear warm-up", ge=0)
    min_lr_ratio: float = key(0.0, "final learning rate as a share of lr", ge=0, le=1)
    kwargs: dict[str, Any] = key({}, "arguments of transformers' schedule of that name: num_cycles "
                                 "of cosine_with_restarts, power of polynomial, timescale of "
                                 "inverse_sqrt, num_decay_steps (must be given) and decay_type of "
                                 "warmup_stable_decay")


@dataclass
class ValueOptimizerConfig:
    """The value function's optimizer. A key left null takes the value of ``ppo.optimizer``."""

    name: Optional[str] = key(None, "optimizer of the value function; another kind than the "
                              "policy's is not possible under ZeRO",
                              choices=("adamw", "adamw_8bit", "adam", "sgd", "adafactor"))
    betas: Optional[list[float]] = key(None, "decay rates of adamw, adamw_8bit and adam", ge=0,
                                       lt=1)
    eps: Optional[float] = key(None, "epsilon of adamw, adamw_8bit and adam", gt=0)
    momentum: Optional[float] = key(None, "momentum of sgd", ge=0, lt=1)
    weight_decay: Optional[float] = key(None, "weight decay", ge=0)


@dataclass
class ValueSchedulerConfig:
    """The value function's schedule. A key left null takes the value of ``ppo.scheduler``."""

    name: Optional[str] = key(None, "shape of the learning rate over updates",
                              choices=tuple(SCHEDULE_ARGUMENTS))
    warmup_updates: Optional[int] = key(None, "updates of linear warm-up", ge=0)
    min_lr_ratio: Optional[float] = key(None, "final learning rate as a share of value_lr", ge=0,
                                        le=1)
    kwargs: dict[str, Any] = key({}, "arguments of the schedule, laid over ppo.scheduler's where "
                                 "that has the same name")


@dataclass
class ImportanceConfig:
    """Correction for samples of another policy: a stale one, or other arithmetic."""

    level: Optional[str] = key(None, "multiply a token's policy loss by the ratio of the trained "
                               "policy to the one that sampled: the token's own, or the product "
                               "over its response (sequence) (default: token where vLLM samples, "
                               "unless ppo.old_logprobs=sampler; else none)",
                               choices=("none", *LEVELS))
    cap: float = key(2.0, "largest of these weights", gt=0)
    reject: dict[str, Any] = key({}, "leave out of the loss what lies beyond these bounds, by "
                                 "verl's names: token_k1: [0.5,2] or seq_mean_k3: 0.01, say")


@dataclass
class ExamplesConfig:
    path: Optional[str] = key(None, "json, jsonl, csv, parquet or txt file, a folder saved by "
                              "`datasets`, or a Hub data set; its columns say what it holds")
    name: Optional[str] = key(None, "Hub data set configuration")
    split: str = key("train", "split of the data set; splits can be added: train+test")
    columns: dict[str, Any] = key({}, "other names of columns: columns.completion=summary "
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
class PTXConfig:
    """A supervised stream beside the samples."""

    coef: float = key(0.0, "weight of the negative log-likelihood of the examples of ptx.data in "
                      "the loss of each update of the policy (0: none are mixed in)", ge=0)
    mini_batch_size: Optional[int] = key(None, "examples of an update (default: "
                                         "ppo.mini_batch_size)", ge=1)
    data: ExamplesConfig = key(ExamplesConfig, "the examples, as `ppocli sft` reads them")


@dataclass
class PPOConfig:
    total_episodes: Optional[int] = key(None, "samples that the whole run learns from", ge=1)
    epochs: Optional[int] = key(None, "passes over the prompts in the whole run, with n samples of "
                                "each", ge=1)
    num_steps: Optional[int] = key(None, "steps (rollout + optimize) in the whole run", ge=1)
    num_rollouts: int = key(128, "samples per rollout phase", ge=1)
    n: int = key(1, "samples of each prompt, one after another; they count in num_rollouts", ge=1)
    dynamic_sampling: Optional[int] = key(
        None, "grpo, rloo: draw prompts in place of those whose samples all score the same, up to "
        "this many times num_rollouts samples in a step (null: learn from all)", ge=2)
    chunk_size: Optional[int] = key(None, "samples that are generated at once, and scored at once "
                                    "(default: num_rollouts, at most 128)", ge=1)
    ppo_epochs: int = key(4, "passes over a rollout", ge=1)
    critic_epochs: Optional[int] = key(None, "passes over a rollout for the value function alone, "
                                       "before those of ppo_epochs (null: none)", ge=1)
    mini_batch_size: int = key(32, "samples per optimizer update", ge=1)
    micro_batch_size: Optional[int] = key(None, "samples per forward/backward pass (default: "
                                          "mini_batch_size); never changes the gradient", ge=1)
    micro_batch_tokens: Optional[int] = key(
        None, "tokens per forward/backward pass at most, prompt, response and padding, "
        "where one sample alone has no more (default: no limit); never changes the gradient", ge=1)
    cliprange: float = key(0.2, "ratio clip of the policy loss", gt=0, lt=1)
    cliprange_high: Optional[float] = key(None, "upper ratio clip (default: cliprange)", gt=0)
    dual_clip: Optional[float] = key(None, "largest ratio that a negative advantage is charged "
                                     "with (null: any)", gt=1)
    cliprange_value: Optional[float] = key(0.2, "clip of the value change (null: none)", gt=0)
    vf_coef: float = key(0.1, "weight of the value loss", ge=0)
    ent_coef: float = key(0.0, "weight of the entropy bonus", ge=0)
    ent_coef_end: Optional[float] = key(None, "its weight in the last step, reached from ent_coef "
                                        "in equal parts (null: ent_coef throughout)", ge=0)
    positive_nll_coef: float = key(0.0, "weight of the negative log-likelihood of responses with a "
                                   "score above positive_above", ge=0)
    positive_above: float = key(0.0, "score, as the reward gave it, from above which a response is "
                                "imitated with weight positive_nll_coef")
    ptx: PTXConfig = key(PTXConfig, "supervised examples mixed into the loss")
    gamma: float = key(1.0, "discount of token rewards (gae, reinforce_pp)", ge=0, le=1)
    lam: float = key(0.95, "GAE lambda", ge=0, le=1)
    gae_unit: str = key("token", "what GAE steps over where an environment answers (env.fn): "
                        "tokens, or whole turns, whose tokens share an advantage",
                        choices=("token", "turn"))
    lam_value: Optional[float] = key(None, "gae: lambda of what the value function learns, where "
                                     "it is another one (1: the sum of what was rewarded)", ge=0,
                                     le=1)
    lam_alpha: Optional[float] = key(None, "gae: make the policy's lambda 1 - 1 / (lam_alpha * "
                                     "tokens of the response), such as 0.05, in place of lam", gt=0)
    advantage: str = key("gae", "advantage estimator; only gae has a value model",
                         choices=tuple(ESTIMATORS))
    policy_loss: str = key("clip", "how far from the sampling policy counts: ratios clipped by "
                           "token, or by response (gspo), weights cut (cispo) or dropped (dis)",
                           choices=("clip", "gspo", "cispo", "dis"))
    mask_truncated: bool = key(False, "leave responses that did not end out of the loss, though "
                               "their rewards count for the advantages of others")
    batch_std: bool = key(False, "grpo: divide by the deviation of the whole rollout")
    group_std: bool = key(True, "grpo: divide by the deviation of the prompt's samples (false: "
                          "Dr. GRPO)")
    loss_aggregation: str = key("token-mean", "what the loss sums are divided by: all response "
                                "tokens of the update, or per sequence first",
                                choices=("token-mean", "token-sum", "seq-mean-token-mean",
                                         "seq-mean-token-sum", "seq-mean-token-sum-norm"))
    init_kl_coef: float = key(0.05, "coefficient of the KL to the reference", ge=0)
    kl_in: Optional[str] = key(None, "charge the KL in the reward, or as a term of the loss "
                               "(default: loss with grpo, else reward)", choices=("reward", "loss"))
    kl_estimator: Optional[str] = key(None, "per-token KL estimate, or the 'full' KL over the "
                                      "vocabulary (default: k1 in the reward; in the loss k3+, "
                                      "without a critic k3)",
                                      choices=("k1", "abs", "k2", "k3", "k3+", "full"))
    kl_controller: str = key("fixed", "keep the coefficient, or steer it towards target",
                             choices=("fixed", "adaptive"))
    target: float = key(6.0, "KL per sequence (nats) that the adaptive controller aims at", gt=0)
    horizon: int = key(10000, "samples over which the adaptive controller reacts", ge=1)
    target_kl: Optional[float] = key(None, "stop the epochs of a step when the policy moved more "
                                     "than 1.5 times this (nats per token)", gt=0)
    ratio_threshold: Optional[float] = key(10.0, "skip an update whose mean ratio exceeds this",
                                           gt=1)
    whiten_advantages: Optional[bool] = key(None, "centre and scale advantages over the whole "
                                            "rollout (default: with gae and reinforce_pp)")
    whiten_rewards: bool = key(False, "scale per-token rewards, keeping their mean")
    max_grad_norm: Optional[float] = key(1.0, "gradient norm clip (null: none)", gt=0)
    max_nonfinite: int = key(3, "stop after this many non-finite updates in a row", ge=1)
    critic_warmup_steps: int = key(0, "first steps that train the value head only", ge=0)
    value_pretrain_steps: int = key(0, "first steps, at most, that train the value function only, "
                                    "on the rewards to come (lambda 1)", ge=0)
    value_pretrain_until: Optional[float] = key(
        None, "explained variance of a rollout's returns, measured before it is learnt from, that "
        "ends value_pretrain_steps early (null: never)", lt=1)
    logprobs_from: str = key("auto", "old logprobs and values of the trained policy: from the "
                             "decoding pass, or from a forward pass (auto: decode in fp32, "
                             "forward in bf16)", choices=("auto", "decode", "forward"))
    old_logprobs: str = key("trainer", "the policy that ratios compare with: the trained one at "
                            "the start of a step's updates, or the one that sampled, by the "
                            "logprobs that it said itself", choices=("trainer", "sampler"))
    staleness: int = key(0, "train on samples of the policy of so many steps before; the first "
                         "steps on those of the first policy", ge=0)
    importance: ImportanceConfig = key(ImportanceConfig, "where samples are another policy's")
    optimizer: PPOOptimizerConfig = key(PPOOptimizerConfig, "the optimizer")
    # the same reward for less KL than at a constant rate (docs/curves.md)
    scheduler: SchedulerConfig = key(lambda: SchedulerConfig(name="linear"),
                                     "the learning-rate schedule, over updates")
    value_optimizer: ValueOptimizerConfig = key(
        ValueOptimizerConfig, "where the value function's optimizer differs (its learning rate: "
        "ppo.optimizer.value_lr)")
    value_scheduler: ValueSchedulerConfig = key(
        ValueSchedulerConfig, "where the value function's schedule differs")


@dataclass
class DataConfig(ExamplesConfig):
    val: Optional[str] = key(None, "what evaluations are made on: a path as of data.path, or the "
                             "share of the rows that is held back, such as 0.05 (drawn by seed)")


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
    optimizer: OptimizerConfig = key(lambda: OptimizerConfig(lr=2e-5), "the optimizer")
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
