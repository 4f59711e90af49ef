"""The words a user may type: every config key with its type, default, range and one-line meaning.

These dataclasses are the only home of defaults and ranges. Hydra composes into them (structured
config), :mod:`ppocli.config.problems` reads the ranges from the field metadata, and the engine
receives plain instances. Nothing heavy is imported here.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Optional

from omegaconf import MISSING

from ppocli.ppo.advantages import ESTIMATORS


def key(default: Any, doc: str, *, choices: tuple[str, ...] | None = None, ge: float | None = None,
        gt: float | None = None, le: float | None = None, lt: float | None = None,
        each: type | None = None) -> Any:
    """A dataclass field with its documentation and its allowed values.

    Bounds are inclusive (``ge``, ``le``) or exclusive (``gt``, ``lt``); for a list they hold for
    each element. ``None`` is allowed exactly where the type is ``Optional``.

    Args:
        each: type of a value that may be one or a list of several, which OmegaConf's own types
            can't say: the field's type is then ``Any``, and null is allowed.
    """
    metadata = {"doc": doc, "choices": choices, "ge": ge, "gt": gt, "le": le, "lt": lt,
                "each": each}
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


@dataclass
class RewardConfig:
    fn: Optional[str] = key(None, "import path (pkg.mod:function, file.py:function), a class, or a "
                            "built-in's short name")
    kwargs: dict[str, Any] = key({}, "arguments bound to reward.fn")
    fns: dict[str, Any] = key({}, "several rewards: name -> {fn, kwargs, weight}; summed, logged "
                              "apart")
    metric_fn: Optional[str] = key(None, "import path of a function returning a dict of lists, "
                                   "logged at evaluation")
    scale: str = key("none", "divide scores by a running std, or by ref_std", choices=(
        "none", "running", "ref"))
    ref_mean: Optional[float] = key(None, "subtracted from scores with scale=ref (default: "
                                    "nothing is)")
    ref_std: Optional[float] = key(None, "std of the reference scores (default: from the first "
                                   "rollout)", gt=0)
    clip: Optional[float] = key(None, "clip scaled scores to [-clip, clip]", gt=0)
    missing_eos_penalty: Optional[float] = key(None, "penalty of a response that never ended",
                                               ge=0)
    min_response_length: Optional[int] = key(None, "responses with fewer tokens get "
                                             "min_response_penalty", ge=1)
    min_response_penalty: Optional[float] = key(None, "penalty of a response that is too short",
                                                ge=0)
    penalty_mode: str = key("subtract", "these two penalties come off the score (as in TRL), or "
                            "take its place (as in torchtune)", choices=("subtract", "replace"))
    overlong_buffer: Optional[int] = key(None, "last tokens below max_new_tokens over which DAPO's "
                                         "penalty for length rises from 0 to overlong_penalty",
                                         ge=1)
    overlong_penalty: Optional[float] = key(None, "largest penalty for length, subtracted "
                                            "(default: 1)", ge=0)
    on_invalid: str = key("error", "what a None or NaN score does: stop, or drop the sample",
                          choices=("error", "skip"))
    ranks: str = key("auto", "with several processes: each scores its share, or the first scores "
                     "all samples (auto: all, unless a function says needs_all_samples)",
                     choices=("auto", "all", "first"))
    timeout: Optional[float] = key(None, "seconds one reward call may take", gt=0)
    retries: int = key(0, "how often a reward call that raised is tried again", ge=0)
    overlap: str = key("auto", "score a chunk in a thread while the next is generated (auto: where "
                       "the reward waits for others, as http does)",
                       choices=("auto", "always", "never"))


@dataclass
class EvalPromptsConfig:
    """Evaluation prompts. A key left null takes the value of the same key in ``prompts``."""

    path: Optional[str] = key(None, "file, folder or Hub data set (default: prompts.path)")
    name: Optional[str] = key(None, "Hub data set configuration")
    split: Optional[str] = key(None, "split of the data set")
    column: Optional[str] = key(None, "column that holds the prompt")
    columns: Optional[list[str]] = key(None, "metadata columns handed to the reward by name")
    items: Optional[list[Any]] = key(None, "prompts given inline")
    limit: int = key(64, "how many evaluation prompts, fixed for the whole run", ge=1)
    repeat: int = key(1, "how many responses to each evaluation prompt", ge=1)
    first_words: Optional[int] = key(None, "keep only the first n words", ge=1)
    length_sampler: Optional[list[int]] = key(None, "[min, max] tokens kept, drawn per prompt",
                                              ge=1)
    template: Optional[str] = key(None, "text with {prompt} and {column} placeholders")
    chat: Optional[bool] = key(None, "render with the tokenizer's chat template")
    max_length: Optional[int] = key(None, "longest prompt in tokens", ge=1)
    truncation_side: Optional[str] = key(None, "which end of a long prompt is cut",
                                         choices=("left", "right"))


@dataclass
class PromptsConfig:
    path: Optional[str] = key(None, "json, jsonl, csv, parquet or txt file, a folder saved by "
                              "`datasets`, or a Hub data set")
    name: Optional[str] = key(None, "Hub data set configuration")
    split: str = key("train", "split of the data set; splits can be added: train+test")
    column: str = key("prompt", "column that holds the prompt")
    columns: Optional[list[str]] = key(None, "metadata columns handed to the reward by name "
                                       "(default: all others)")
    items: Optional[list[Any]] = key(None, "prompts given inline: texts, or mappings with a "
                                     "'prompt' key and metadata")
    limit: Optional[int] = key(None, "use only the first n prompts", ge=1)
    first_words: Optional[int] = key(None, "keep only the first n words", ge=1)
    length_sampler: Optional[list[int]] = key(None, "[min, max] tokens kept, drawn per prompt",
                                              ge=1)
    template: Optional[str] = key(None, "text with {prompt} and {column} placeholders")
    chat: bool = key(False, "render with the tokenizer's chat template")
    max_length: Optional[int] = key(None, "longest prompt in tokens (default: what fits the "
                                    "model beside max_new_tokens)", ge=1)
    truncation_side: str = key("left", "which end of a long prompt is cut",
                               choices=("left", "right"))
    shuffle: bool = key(True, "draw a new order every epoch from the seed")
    eval: EvalPromptsConfig = key(EvalPromptsConfig, "the evaluation prompts")


@dataclass
class EvalGenerationConfig:
    """Overrides of ``generation`` at evaluation. Null: as in training. One of them may be a list:
    evaluations then sample with each of its values, and the first is the one that counts."""

    max_new_tokens: Any = key(None, "longest response in tokens", each=int, ge=1)
    min_new_tokens: Any = key(None, "no stop token before this many tokens", each=int, ge=0)
    temperature: Any = key(None, "softmax temperature", each=float, gt=0)
    top_k: Any = key(None, "sample among the k likeliest tokens (0: all)", each=int, ge=0)
    top_p: Any = key(None, "nucleus sampling (1: all)", each=float, gt=0, le=1)
    do_sample: Any = key(None, "sample, or take the likeliest token", each=bool)


@dataclass
class GenerationConfig:
    max_new_tokens: int = key(32, "longest response in tokens", ge=1)
    min_new_tokens: int = key(0, "no stop token before this many tokens", ge=0)
    temperature: float = key(1.0, "softmax temperature; policy and reference use it too", gt=0)
    top_k: int = key(0, "sample among the k likeliest tokens (0: all)", ge=0)
    top_p: float = key(1.0, "nucleus sampling (1: all)", gt=0, le=1)
    do_sample: bool = key(True, "sample, or take the likeliest token")
    stop_sequences: list[str] = key([], "texts that end a response; trimmed from what the reward "
                                    "sees")
    stop_token_ids: list[int] = key([], "token ids that end a response, besides the model's EOS",
                                    ge=0)
    length_sampler: Optional[list[int]] = key(None, "[min, max] tokens that a rollout's response "
                                              "may have at most, drawn per response", ge=1)
    eval: EvalGenerationConfig = key(EvalGenerationConfig, "overrides at evaluation; one of them "
                                     "may be a list, to evaluate with each of its values")


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
    value_lr: Optional[float] = key(None, "learning rate of the value function (default: lr)", ge=0)


@dataclass
class SchedulerConfig:
    name: str = key("constant", "shape of the learning rate over updates",
                    choices=("constant", "linear", "cosine"))
    warmup_updates: int = key(0, "updates of linear warm-up", ge=0)
    min_lr_ratio: float = key(0.0, "final learning rate as a share of lr", ge=0, le=1)


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
                              choices=("constant", "linear", "cosine"))
    warmup_updates: Optional[int] = key(None, "updates of linear warm-up", ge=0)
    min_lr_ratio: Optional[float] = key(None, "final learning rate as a share of value_lr", ge=0,
                                        le=1)


@dataclass
class PPOConfig:
    total_episodes: Optional[int] = key(None, "samples drawn in the whole run", ge=1)
    num_steps: Optional[int] = key(None, "steps (rollout + optimize) in the whole run", ge=1)
    num_rollouts: int = key(128, "samples per rollout phase", ge=1)
    n: int = key(1, "samples of each prompt, one after another; they count in num_rollouts", ge=1)
    chunk_size: Optional[int] = key(None, "samples per generate call (default: num_rollouts, at "
                                    "most 128)", ge=1)
    ppo_epochs: int = key(4, "passes over a rollout", ge=1)
    mini_batch_size: int = key(32, "samples per optimizer update", ge=1)
    micro_batch_size: Optional[int] = key(None, "samples per forward/backward pass (default: "
                                          "mini_batch_size); never changes the gradient", ge=1)
    cliprange: float = key(0.2, "ratio clip of the policy loss", gt=0, lt=1)
    cliprange_high: Optional[float] = key(None, "upper ratio clip (default: cliprange)", gt=0)
    dual_clip: Optional[float] = key(None, "largest ratio that a negative advantage is charged "
                                     "with (null: any)", gt=1)
    cliprange_value: float = key(0.2, "clip of the value change", gt=0)
    vf_coef: float = key(0.1, "weight of the value loss", ge=0)
    ent_coef: float = key(0.0, "weight of the entropy bonus", ge=0)
    gamma: float = key(1.0, "discount of token rewards (gae, reinforce_pp)", ge=0, le=1)
    lam: float = key(0.95, "GAE lambda", ge=0, le=1)
    advantage: str = key("gae", "advantage estimator; only gae has a value model",
                         choices=tuple(ESTIMATORS))
    group_std: bool = key(True, "grpo: divide by the deviation of the prompt's samples (false: "
                          "Dr. GRPO)")
    loss_aggregation: str = key("token-mean", "what the loss sums are divided by: all response "
                                "tokens of the update, or per sequence first",
                                choices=("token-mean", "token-sum", "seq-mean-token-mean",
                                         "seq-mean-token-sum", "seq-mean-token-sum-norm"))
    init_kl_coef: float = key(0.05, "coefficient of the KL to the reference", ge=0)
    kl_in: Optional[str] = key(None, "charge the KL in the reward, or as a term of the loss "
                               "(default: loss with grpo, else reward)",
                               choices=("reward", "loss"))
    kl_estimator: Optional[str] = key(None, "per-token KL estimate (default: k1 in the reward, k3 "
                                      "in the loss)", choices=("k1", "abs", "k2", "k3", "full"))
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
    logprobs_from: str = key("auto", "old logprobs and values: from the decoding pass, or from a "
                             "forward pass (auto: decode in fp32, forward in bf16)",
                             choices=("auto", "decode", "forward"))
    optimizer: OptimizerConfig = key(OptimizerConfig, "the optimizer")
    scheduler: SchedulerConfig = key(SchedulerConfig, "the learning-rate schedule, over updates")
    value_optimizer: ValueOptimizerConfig = key(
        ValueOptimizerConfig, "where the value function's optimizer differs (its learning rate: "
        "ppo.optimizer.value_lr)")
    value_scheduler: ValueSchedulerConfig = key(
        ValueSchedulerConfig, "where the value function's schedule differs")


@dataclass
class HardwareConfig:
    device: str = key("auto", "where to compute", choices=("auto", "cpu", "cuda"))
    precision: str = key("fp32", "compute type; trained weights and optimizer state stay fp32",
                         choices=("fp32", "bf16"))
    num_threads: Optional[int] = key(None, "CPU threads of each process (default: torch's "
                                     "choice)", ge=1)
    num_processes: int = key(1, "processes on each node: one a GPU, or several on a CPU", ge=1)
    num_nodes: int = key(1, "machines that run the same command, each with its node_rank", ge=1)
    node_rank: int = key(0, "number of this machine, from 0", ge=0)
    rdzv_endpoint: Optional[str] = key(None, "HOST:PORT of node 0, where the nodes meet")
    zero_stage: int = key(0, "DeepSpeed ZeRO: 0 replicates everything, 1 shards the optimizer, 2 "
                          "gradients too, 3 weights too", ge=0, le=3)
    offload_optimizer: bool = key(False, "keep optimizer state in host memory (ZeRO 1 to 3)")
    offload_param: bool = key(False, "keep weights in host memory (ZeRO 3)")
    gather_for_generation: bool = key(True, "ZeRO 3: whole weights on each process in rollouts")
    deepspeed_config: Optional[str] = key(None, "a DeepSpeed JSON file of your own; what it leaves "
                                          "open is filled in")
    memory_check: str = key("error", "what a run does that surely does not fit into memory, before "
                            "it loads weights: stop, warn, or not look",
                            choices=("error", "warn", "off"))
    timeout_seconds: int = key(1800, "how long a process waits for the others", ge=1)


@dataclass
class EvalConfig:
    every_steps: Optional[int] = key(10, "evaluate every n steps (null: only at start and end)",
                                     ge=1)
    at_start: bool = key(True, "evaluate before training")
    ref_responses: bool = key(False, "put the reference's response to each prompt beside the "
                              "policy's in samples.jsonl and the report")


@dataclass
class CheckpointConfig:
    every_steps: Optional[int] = key(10, "save every n steps (null: only at the end)", ge=1)
    every_minutes: Optional[float] = key(None, "save at least this often", gt=0)
    keep_last: int = key(2, "how many of the newest checkpoints stay on disk", ge=1)
    keep_best: bool = key(True, "also keep the checkpoint with the best evaluation")
    metric: str = key("reward_mean", "evaluation figure that 'best' maximises: reward_mean, or "
                      "metrics/NAME of metric_fn")


@dataclass
class TrackingConfig:
    trackers: list[str] = key(["tensorboard"], "list of where figures go beside metrics.jsonl; "
                              "wandb and trackio are extras: pip install 'ppocli[wandb]'",
                              choices=("tensorboard", "wandb", "trackio"))
    project: Optional[str] = key(None, "project of wandb and trackio (default: WANDB_PROJECT for "
                                 "wandb, else ppocli)")
    log_rollouts: bool = key(False, "write every rollout sample to samples.jsonl, not only "
                             "evaluation samples")
    rollout_tokens: bool = key(False, "with log_rollouts: also token ids, and logprobs, values and "
                               "KL of each token")


@dataclass
class TrainConfig:
    seed: int = key(0, "seed of sampling, prompt order, value head and minibatch order", ge=0)
    run_name: Optional[str] = key(None, "name of the run folder (default: recipe and time)")
    output_dir: str = key("runs", "folder that holds the run folders")
    resume: str = key("never", "never, auto (go on if output_dir/run_name exists), or a run folder")
    model: ModelConfig = key(ModelConfig, "the policy")
    reward: RewardConfig = key(RewardConfig, "what is rewarded")
    prompts: PromptsConfig = key(PromptsConfig, "what the policy answers to")
    generation: GenerationConfig = key(GenerationConfig, "how responses are sampled")
    ppo: PPOConfig = key(PPOConfig, "the algorithm")
    hardware: HardwareConfig = key(HardwareConfig, "where it runs")
    eval: EvalConfig = key(EvalConfig, "evaluation during training")
    checkpoint: CheckpointConfig = key(CheckpointConfig, "what is kept on disk")
    tracking: TrackingConfig = key(TrackingConfig, "what is logged")


def planned_episodes(ppo: PPOConfig) -> int:
    """Samples in the whole run, given by ``total_episodes`` or ``num_steps``."""
    return ppo.total_episodes or (ppo.num_steps or 0) * ppo.num_rollouts


def reference_kind(model: ModelConfig) -> str:
    """``copy``, ``shared``, ``adapter`` or ``none``: what ``model.reference.kind`` comes to."""
    if model.reference.kind != "auto":
        return model.reference.kind
    if model.reference.path is not None:
        return "copy"
    if model.peft:
        return "adapter"
    return "shared" if model.num_layers_unfrozen >= 0 else "copy"
