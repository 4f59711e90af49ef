"""How a key is declared, and those of what learns: sizes, losses, KL, optimizers, schedules and
examples, of PPO and of trainings on a data set (``ppocli sft``, ``ppocli reward-model``)."""

from dataclasses import dataclass, field
from typing import Any, Literal, Optional

from ppocli.ppo.advantages import ESTIMATORS, LEVELS

LONGEST_WAIT = 1e9
"""seconds of a time limit, some 30 years: clocks of the system's take not many more"""
MAX_SEED = 2**63
"""what seeds are below: generators take signed numbers of 64 bits"""


def key(default: Any, *, choices: tuple[str, ...] | None = None, ge: float | None = None,
        gt: float | None = None, le: float | None = None, lt: float | None = None,
        each: type | None = None, import_path: bool = False,
        holds: Literal["path", "rows", "code", "arguments"] | None = None,
        on_resume: Literal["harmless", "refused"] | None = None) -> Any:
    """A dataclass field with its allowed values; the docstring under it says what it means.

    Bounds are inclusive (``ge``, ``le``) or exclusive (``gt``, ``lt``); for a list they hold for
    each element. ``None`` is allowed exactly where the type is ``Optional``.

    Args:
        default: of a section what makes it, its class or a function.
        each: type of a value that may be one or a list of several, which OmegaConf's own types
            can't say: the field's type is then ``Any``, and null is allowed.
        import_path: beside the ``choices``, an import path names something of the user's own.
        holds: what may have to be found from another folder: a path on the disk, the paths of rows
            (:func:`ppocli.config.keys.row_paths`), the import path of code of the user's own,
            or its arguments.
        on_resume: what a change means to a run that goes on
            (:func:`ppocli.config.resume_policy.classify_change`), unless its section says it.
    """
    metadata = {"choices": choices, "ge": ge, "gt": gt, "le": le, "lt": lt, "each": each,
                "import_path": import_path, "holds": holds, "on_resume": on_resume}
    if isinstance(default, (list, dict)):
        return field(default_factory=lambda: type(default)(default), metadata=metadata)
    if callable(default):
        return field(default_factory=default, metadata=metadata)
    return field(default=default, metadata=metadata)


OPTIMIZER_KEYS = {"adamw": ("betas", "eps"), "adamw_8bit": ("betas", "eps"),
                  "adam": ("betas", "eps"), "sgd": ("momentum",), "adafactor": ()}
"""by name of the optimizer, the keys that only some have; all have lr, value_lr and weight_decay"""


@dataclass
class OptimizerConfig:
    name: str = key("adamw", choices=tuple(OPTIMIZER_KEYS), on_resume="refused")
    """optimizer; adamw_8bit needs bitsandbytes (extra 8bit)"""
    lr: float = key(1.41e-5, ge=0)
    """learning rate (adafactor: relative to the scale of each weight)"""
    betas: list[float] = key([0.9, 0.999], ge=0, lt=1)
    """decay rates of adamw, adamw_8bit and adam"""
    eps: float = key(1e-8, gt=0)
    """epsilon of adamw, adamw_8bit and adam"""
    momentum: float = key(0.0, ge=0, lt=1)
    """momentum of sgd"""
    weight_decay: float = key(0.0, ge=0)
    """weight decay: decoupled, or L2 with adam and sgd"""


@dataclass
class PPOOptimizerConfig(OptimizerConfig):
    value_lr: Optional[float] = key(None, ge=0)
    """learning rate of the value function (default: lr)"""


SCHEDULE_ARGUMENTS = {
    "constant": (), "linear": (), "cosine": (), "cosine_with_restarts": ("num_cycles",),
    "polynomial": ("power",), "inverse_sqrt": ("timescale",),
    "warmup_stable_decay": ("num_decay_steps", "decay_type")}
"""by name of the schedule, what its ``kwargs`` may hold"""


@dataclass
class SchedulerConfig:
    name: str = key("constant", choices=tuple(SCHEDULE_ARGUMENTS))
    """shape of the learning rate over updates"""
    warmup_updates: int = key(0, ge=0)
    """updates of linear warm-up"""
    min_lr_ratio: float = key(0.0, ge=0, le=1)
    """final learning rate as a share of lr"""
    kwargs: dict[str, Any] = key({})
    """arguments of transformers' schedule of that name: num_cycles of cosine_with_restarts, power
    of polynomial, timescale of inverse_sqrt, num_decay_steps (must be given) and decay_type of
    warmup_stable_decay"""


@dataclass
class ValueOptimizerConfig:
    """The value function's optimizer. A key left null takes the value of ``ppo.optimizer``."""

    name: Optional[str] = key(None, choices=tuple(OPTIMIZER_KEYS), on_resume="refused")
    """optimizer of the value function; another kind than the policy's is not possible under ZeRO"""
    betas: Optional[list[float]] = key(None, ge=0, lt=1)
    """decay rates of adamw, adamw_8bit and adam"""
    eps: Optional[float] = key(None, gt=0)
    """epsilon of adamw, adamw_8bit and adam"""
    momentum: Optional[float] = key(None, ge=0, lt=1)
    """momentum of sgd"""
    weight_decay: Optional[float] = key(None, ge=0)
    """weight decay"""


@dataclass
class ValueSchedulerConfig:
    """The value function's schedule. A key left null takes the value of ``ppo.scheduler``."""

    name: Optional[str] = key(None, choices=tuple(SCHEDULE_ARGUMENTS))
    """shape of the learning rate over updates"""
    warmup_updates: Optional[int] = key(None, ge=0)
    """updates of linear warm-up"""
    min_lr_ratio: Optional[float] = key(None, ge=0, le=1)
    """final learning rate as a share of value_lr"""
    kwargs: dict[str, Any] = key({})
    """arguments of the schedule, laid over ppo.scheduler's where that has the same name"""


@dataclass
class ImportanceConfig:
    """Correction for samples of another policy: a stale one, or other arithmetic."""

    level: Optional[str] = key(None, choices=("none", *LEVELS))
    """multiply a token's policy loss by the ratio of the trained policy to the one that sampled:
    the token's own, or the product over its response (sequence) (default: token where vLLM samples,
    unless ppo.old_logprobs=sampler; else none)"""
    cap: float = key(2.0, gt=0)
    """largest of these weights"""
    reject: dict[str, Any] = key({})
    """leave out of the loss what lies beyond these bounds, by verl's names: token_k1: [0.5,2] or
    seq_mean_k3: 0.01, say"""


@dataclass
class ExamplesConfig:
    path: Any = key(None, each=str, holds="rows")
    """json, jsonl, csv, tsv, parquet or txt file, a pattern or list of such, an address of one, a
    folder, also one saved by `datasets`, a Hub data set, or a task: reasoning_gym:NAME; its columns
    say what it holds"""
    kwargs: dict[str, Any] = key({}, holds="arguments")
    """arguments of the task: size, seed (default 0), and those of its difficulty"""
    name: Optional[str] = key(None)
    """configuration of a data set on the Hub, or of a folder"""
    split: str = key("train")
    """split of the data set; splits can be added: train+test"""
    columns: dict[str, Any] = key({})
    """other names of columns: columns.completion=summary reads the completion from the column
    summary"""
    limit: Optional[int] = key(None, ge=1)
    """use only the first n rows"""
    max_length: Optional[int] = key(None, ge=2)
    """longest example in tokens (default: what the model reads); longer ones are cut, longer pairs
    dropped"""
    train_on: str = key("auto", choices=("auto", "completion", "assistant", "all"))
    """the tokens that count: the 'completion' after a prompt, every turn of the 'assistant', or
    'all' (auto: completion where there is a prompt, assistant in conversations, else all)"""
    chat: bool = key(False)
    """render plain prompts with the tokenizer's chat template, as the turn of a user (conversations
    always are)"""
    template: Optional[str] = key(None)
    """text with {prompt} and {column} placeholders that becomes the prompt"""
    packing: bool = key(True, on_resume="harmless")
    """lay the examples of a pass out in one row without padding, each attending to itself alone,
    where the model allows it; never changes the gradient"""
    shuffle: bool = key(True)
    """draw a new order every epoch from the seed"""


@dataclass
class PTXConfig:
    """A supervised stream beside the samples."""

    coef: float = key(0.0, ge=0)
    """weight of the negative log-likelihood of the examples of ptx.data in the loss of each update
    of the policy (0: none are mixed in)"""
    mini_batch_size: Optional[int] = key(None, ge=1)
    """examples of an update (default: ppo.mini_batch_size)"""
    data: ExamplesConfig = key(ExamplesConfig)
    """the examples, as `ppocli sft` reads them"""


@dataclass
class PPOConfig:
    total_episodes: Optional[int] = key(None, ge=1, on_resume="harmless")
    """samples that the whole run learns from"""
    epochs: Optional[int] = key(None, ge=1, on_resume="harmless")
    """passes over the prompts in the whole run, with n samples of each"""
    num_steps: Optional[int] = key(None, ge=1, on_resume="harmless")
    """steps (rollout + optimize) in the whole run"""
    num_rollouts: int = key(128, ge=1)
    """samples per rollout phase"""
    n: int = key(1, ge=1, on_resume="refused")
    """samples of each prompt, one after another; they count in num_rollouts"""
    dynamic_sampling: Optional[int] = key(None, ge=2)
    """grpo, rloo: draw prompts in place of those whose samples all score the same, up to this many
    times num_rollouts samples in a step (null: learn from all)"""
    chunk_size: Optional[int] = key(None, ge=1)
    """samples that are generated at once, and scored at once (default: num_rollouts, at most
    128)"""
    ppo_epochs: int = key(4, ge=1)
    """passes over a rollout"""
    critic_epochs: Optional[int] = key(None, ge=1)
    """passes over a rollout for the value function alone, before those of ppo_epochs (null:
    none)"""
    mini_batch_size: int = key(32, ge=1)
    """samples per optimizer update"""
    micro_batch_size: Optional[int] = key(None, ge=1, on_resume="harmless")
    """samples per forward/backward pass (default: mini_batch_size); never changes the gradient"""
    micro_batch_tokens: Optional[int] = key(None, ge=1, on_resume="harmless")
    """tokens per forward/backward pass at most, prompt, response and padding, where one sample
    alone has no more (default: no limit); never changes the gradient"""
    cliprange: float = key(0.2, gt=0, lt=1)
    """ratio clip of the policy loss"""
    cliprange_high: Optional[float] = key(None, gt=0)
    """upper ratio clip (default: cliprange)"""
    dual_clip: Optional[float] = key(None, gt=1)
    """largest ratio that a negative advantage is charged with (null: any)"""
    cliprange_value: Optional[float] = key(0.2, gt=0)
    """clip of the value change (null: none)"""
    vf_coef: float = key(0.1, ge=0)
    """weight of the value loss"""
    ent_coef: float = key(0.0, ge=0)
    """weight of the entropy bonus"""
    ent_coef_end: Optional[float] = key(None, ge=0)
    """its weight in the last step, reached from ent_coef in equal parts (null: ent_coef
    throughout)"""
    positive_nll_coef: float = key(0.0, ge=0)
    """weight of the negative log-likelihood of responses with a score above positive_above"""
    positive_above: float = key(0.0)
    """score, as the reward gave it, from above which a response is imitated with weight
    positive_nll_coef"""
    ptx: PTXConfig = key(PTXConfig)
    """supervised examples mixed into the loss"""
    gamma: float = key(1.0, ge=0, le=1)
    """discount of token rewards (gae, reinforce_pp)"""
    lam: float = key(1.0, ge=0, le=1)
    """GAE lambda"""
    gae_unit: str = key("token", choices=("token", "turn"))
    """what GAE steps over where an environment answers (env.fn): tokens, or whole turns, whose
    tokens share an advantage"""
    lam_value: Optional[float] = key(None, ge=0, le=1)
    """gae: lambda of what the value function learns, where it is another one (1: the sum of what
    was rewarded)"""
    lam_alpha: Optional[float] = key(None, gt=0)
    """gae: make the policy's lambda 1 - 1 / (lam_alpha * tokens of the response), such as 0.05, in
    place of lam"""
    advantage: str = key("gae", choices=tuple(ESTIMATORS), on_resume="refused")
    """advantage estimator; only gae has a value model"""
    policy_loss: str = key("clip", choices=("clip", "gspo", "cispo", "dis"))
    """how far from the sampling policy counts: ratios clipped by token, or by response (gspo),
    weights cut (cispo) or dropped (dis)"""
    mask_truncated: bool = key(False)
    """leave responses that did not end out of the loss, though their rewards count for the
    advantages of others"""
    batch_std: bool = key(False)
    """grpo: divide by the deviation of the whole rollout"""
    group_std: bool = key(True)
    """grpo: divide by the deviation of the prompt's samples (false: Dr. GRPO)"""
    group_baseline: bool = key(True)
    """gae with n > 1: what values miss of a prompt is taken from its other samples (false: each
    sample has its values alone, as elsewhere)"""
    loss_aggregation: str = key("token-mean", choices=(
        "token-mean", "token-sum", "seq-mean-token-mean", "seq-mean-token-sum",
        "seq-mean-token-sum-norm"))
    """what the loss sums are divided by: all response tokens of the update, or per sequence
    first"""
    init_kl_coef: Optional[float] = key(None, ge=0)
    """coefficient of the KL to the reference (default: 0.2 as a term of the loss beside whitened
    advantages, else 0.05)"""
    kl_in: Optional[str] = key(None, choices=("reward", "loss"))
    """charge the KL in the reward, or as a term of the loss (default: loss with grpo, and with gae
    unless kl_estimator is k1, abs or full; else reward)"""
    kl_estimator: Optional[str] = key(None, choices=("k1", "abs", "k2", "k3", "k3+", "full"))
    """per-token KL estimate, or the 'full' KL over the vocabulary (default: k1 in the reward; in
    the loss k3+, without a critic k3)"""
    kl_controller: str = key("fixed", choices=("fixed", "adaptive"), on_resume="refused")
    """keep the coefficient, or steer it towards target"""
    target: float = key(6.0, gt=0)
    """KL per sequence (nats) that the adaptive controller aims at"""
    horizon: int = key(10000, ge=1)
    """samples over which the adaptive controller reacts"""
    target_kl: Optional[float] = key(None, gt=0)
    """stop the epochs of a step when the policy moved more than 1.5 times this (nats per token)"""
    step_kl: Optional[float] = key(0.5, gt=0)
    """steer the learning rate so that the updates of a step move the policy by this KL (nats per
    response), times the square of the schedule's factor; needs two updates a step (null: the rate
    is ppo.optimizer.lr)"""
    ratio_threshold: Optional[float] = key(10.0, gt=1)
    """skip an update whose mean ratio exceeds this"""
    whiten_advantages: Optional[bool] = key(None)
    """centre and scale advantages over the whole rollout (default: with gae and reinforce_pp)"""
    whiten_rewards: bool = key(False)
    """scale per-token rewards, keeping their mean"""
    max_grad_norm: Optional[float] = key(1.0, gt=0)
    """gradient norm clip (null: none)"""
    max_nonfinite: int = key(3, ge=1, on_resume="harmless")
    """stop after this many non-finite updates in a row"""
    critic_warmup_steps: int = key(0, ge=0)
    """first steps that train the value head only"""
    value_pretrain_steps: int = key(0, ge=0)
    """first steps, at most, that train the value function only, on the rewards to come (lambda
    1)"""
    value_pretrain_until: Optional[float] = key(None, lt=1)
    """explained variance of a rollout's returns, measured before it is learnt from, that ends
    value_pretrain_steps early (null: never)"""
    logprobs_from: str = key("auto", choices=("auto", "decode", "forward"))
    """old logprobs and values of the trained policy: from the decoding pass, or from a forward pass
    (auto: decode in fp32; forward in bf16, where transformers' generate decodes, and once the first
    ratios of a step have been off 1)"""
    old_logprobs: str = key("trainer", choices=("trainer", "sampler"))
    """the policy that ratios compare with: the trained one at the start of a step's updates, or the
    one that sampled, by the logprobs that it said itself"""
    staleness: int = key(0, ge=0)
    """train on samples of the policy of so many steps before; the first steps on those of the first
    policy"""
    importance: ImportanceConfig = key(ImportanceConfig)
    """where samples are another policy's"""
    optimizer: PPOOptimizerConfig = key(PPOOptimizerConfig)
    """the optimizer"""
    # the same reward for less KL than at a constant rate (docs/less-kl.md)
    scheduler: SchedulerConfig = key(lambda: SchedulerConfig(name="linear"))
    """the learning-rate schedule, over updates"""
    value_optimizer: ValueOptimizerConfig = key(ValueOptimizerConfig)
    """where the value function's optimizer differs (its learning rate: ppo.optimizer.value_lr)"""
    value_scheduler: ValueSchedulerConfig = key(ValueSchedulerConfig)
    """where the value function's schedule differs"""


@dataclass
class DataConfig(ExamplesConfig):
    val: Any = key(None, each=str, holds="rows")
    """what evaluations are made on: a path as of data.path, or the share of the rows that is held
    back, such as 0.05 (drawn by seed)"""


@dataclass
class UpdatesConfig:
    """How long to train on a data set, and in which steps."""

    epochs: Optional[int] = key(None, ge=1, on_resume="harmless")
    """passes over the data (default: 1)"""
    num_updates: Optional[int] = key(None, ge=1, on_resume="harmless")
    """optimizer updates, in place of epochs"""
    mini_batch_size: int = key(32, ge=1)
    """examples (of a reward model: pairs) per optimizer update"""
    micro_batch_size: Optional[int] = key(None, ge=1, on_resume="harmless")
    """examples or pairs per forward/backward pass (default: mini_batch_size); never changes the
    gradient"""
    micro_batch_tokens: Optional[int] = key(None, ge=1, on_resume="harmless")
    """tokens per forward/backward pass at most, where one example alone has no more (default: no
    limit); never changes the gradient"""
    max_grad_norm: Optional[float] = key(1.0, gt=0)
    """gradient norm clip (null: none)"""
    max_nonfinite: int = key(3, ge=1, on_resume="harmless")
    """stop after this many non-finite updates in a row"""
    optimizer: OptimizerConfig = key(lambda: OptimizerConfig(lr=2e-5))
    """the optimizer"""
    scheduler: SchedulerConfig = key(SchedulerConfig)
    """the learning-rate schedule, over updates"""


@dataclass
class SFTConfig(UpdatesConfig):
    neftune: Optional[float] = key(None, gt=0)
    """noise on the embeddings while training, its largest value times sqrt(tokens * width)
    (NEFTune's alpha, such as 5)"""
    eval_samples: int = key(8, ge=0)
    """responses to prompts of data.val that evaluations show (0: none)"""


@dataclass
class RewardModelConfig(UpdatesConfig):
    center_coef: float = key(0.0, ge=0)
    """weight of (chosen + rejected score)^2, which holds scores around 0"""
