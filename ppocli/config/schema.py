"""The words a user may type: every config key with its type, default, range and, as the docstring
under it, its meaning (:func:`ppocli.config.keys.doc_of`).

These dataclasses, with those of ``schema_training`` and ``schema_run``, are the only home of
defaults and ranges. Hydra composes into them (structured config), :mod:`ppocli.config.problems`
reads the ranges from the field metadata, and the engine receives plain instances. Nothing heavy is
imported.
"""

from dataclasses import dataclass
from typing import Any, Optional

from omegaconf import MISSING

from ppocli.config.schema_run import (
    CheckpointConfig,
    EnvConfig,
    EvalConfig,
    HardwareConfig,
    RolloutConfig,
    SweepConfig,
    TrackingConfig,
)
from ppocli.config.schema_training import (
    LONGEST_WAIT,
    MAX_SEED,
    DataConfig,
    PPOConfig,
    RewardModelConfig,
    SFTConfig,
    key,
)


@dataclass
class ReferenceConfig:
    kind: str = key("auto", choices=("auto", "copy", "shared", "adapter", "none"),
                    on_resume="refused")
    """frozen starting policy that the KL is measured against: a 'copy', 'shared' with the policy's
    frozen layers, or the policy with its 'adapter' switched off (auto: adapter with model.peft,
    shared where model.num_layers_unfrozen freezes some, else copy); 'none' trains without a KL
    term"""
    path: Optional[str] = key(None, on_resume="refused", holds="path")
    """folder or Hub name of another reference than the model that the policy starts from; it has
    the same tokenizer"""
    offload: bool = key(False, on_resume="harmless")
    """keep the reference in host memory while it is not run"""
    device: Optional[str] = key(None, on_resume="harmless")
    """kind=copy: run the reference elsewhere: cpu, cuda:1, ... (default: beside the policy)"""
    sync_every: Optional[int] = key(None, ge=1)
    """kind=copy: steps after which it becomes the policy of that moment (null: it stays as it
    starts)"""
    sync_alpha: float = key(1.0, gt=0, le=1)
    """share of the policy in that; the rest stays what it was"""
    shard: Optional[bool] = key(None, on_resume="harmless")
    """keep a part of it on each process (default: under ZeRO 3)"""


@dataclass
class ValueConfig:
    kind: str = key("head", choices=("head", "branch", "adapter", "model"), on_resume="refused")
    """a 'head' on the policy's trunk, a 'branch' with top layers of its own, an 'adapter' like
    model.peft's on the same frozen base, or a 'model' of its own"""
    path: Optional[str] = key(None, on_resume="refused", holds="path")
    """kind=model: folder or Hub name, such as the reward model's (default: model.path); any kind: a
    PPO run or a checkpoint of one, as whose value function this one starts; kind=adapter: also what
    `ppocli export --adapter` has written"""
    num_layers_unfrozen: int = key(-1, ge=-1, on_resume="refused")
    """kind=branch: how many top layers of its own; kind=model: train only the top k layers (-1:
    all)"""
    freeze_attention: bool = key(False, on_resume="refused")
    """kind=branch or model: leave its attention as it starts"""


@dataclass
class ModelConfig:
    path: str = key(MISSING, on_resume="refused", holds="path")
    """a folder, a Hub name, or builtin:reviews / builtin:randomwalks; an adapter goes on under
    model.peft, and is merged without it"""
    revision: Optional[str] = key(None, on_resume="refused")
    """branch, tag or commit of a Hub model"""
    tokenizer_path: Optional[str] = key(None, on_resume="refused", holds="path")
    """tokenizer folder or Hub name (default: model.path)"""
    chat_template: Optional[str] = key(None, on_resume="refused", holds="path")
    """file with a Jinja template for conversations (default: the tokenizer's own)"""
    chat_template_kwargs: dict[str, Any] = key({}, on_resume="refused")
    """values that the chat template reads, such as {enable_thinking: false}; exported models keep
    them"""
    chat_template_date: Optional[str] = key(None)
    """the moment that strftime_now of a chat template tells in place of the present: 2026-01-31 or
    2026-01-31T12:00:00, local time (default: when the run was first started, which config.yaml
    keeps if a template tells the date); exported models tell the present"""
    dtype: Optional[str] = key(None, choices=("fp32", "bf16"), on_resume="refused")
    """storage type of what never trains: the reference and, with model.peft, the policy's base
    (default: hardware.precision)"""
    peft: Optional[dict[str, Any]] = key({})
    """train an adapter on a frozen base: type (lora) and fields of that config of
    PEFT"""
    quantization: Optional[str] = key(None, choices=("8bit", "4bit"))
    """hold the frozen base under model.peft in 8 or 4 bits (bitsandbytes)"""
    num_layers_unfrozen: int = key(-1, ge=-1, on_resume="refused")
    """train only the top k layers (-1: all)"""
    gradient_checkpointing: bool = key(False, on_resume="harmless")
    """recompute activations in the backward pass"""
    attn_implementation: Optional[str] = key(None)
    """sdpa, eager, flash_attention_2, ... (default: transformers' choice)"""
    trust_remote_code: bool = key(False)
    """run Python code that the model's repository ships"""
    value: ValueConfig = key(ValueConfig)
    """the value function"""
    reference: ReferenceConfig = key(ReferenceConfig)
    """the reference policy"""


REWARD_STYLES = ("ppocli", "trl", "trlx", "verl", "openrlhf")
FNS_KEYS = ("fn", "kwargs", "weight", "style")
"""keys of an entry of ``reward.fns``"""


def is_own_figure(name: str) -> bool:
    """Whether ``reward/NAME`` is a figure of all rewards together."""
    return name in ("mean", "std", "invalid") or name.startswith(("penalty/", "mean/"))


@dataclass
class RewardConfig:
    fn: Optional[str] = key(None, holds="code")
    """import path (pkg.mod:function, file.py:function), a class, or a built-in's short name"""
    kwargs: dict[str, Any] = key({}, holds="arguments")
    """arguments bound to reward.fn"""
    style: str = key("auto", choices=("auto", *REWARD_STYLES))
    """which library's way of calling a reward and reading its answer the function was written for
    (auto: told by its parameters)"""
    fns: dict[str, Any] = key({})
    """several rewards: name -> {fn, kwargs, weight, style}; summed, logged apart"""
    step_separator: Optional[str] = key(None)
    """text that ends a step of a response; rewards with a parameter steps score each of them"""
    step_fn: Optional[str] = key(None, holds="code")
    """in place of step_separator: words, or the import path of a function that returns for each
    response the texts of its steps"""
    metric_fn: Optional[str] = key(None, holds="code")
    """import path of a function returning a dict of lists, logged at evaluation"""
    scale: str = key("none", choices=("none", "running", "ref"), on_resume="refused")
    """divide scores by a running std, or by ref_std"""
    ref_mean: Optional[float] = key(None)
    """subtracted from scores with scale=ref (default: nothing is, but with center what lies with
    the reward model)"""
    ref_std: Optional[float] = key(None, gt=0)
    """std of the reference scores (default: what lies with the reward model, else from the first
    rollout)"""
    center: bool = key(False)
    """take the mean off too: with scale=running the running one (TRL's use_score_norm), with
    scale=ref ref_mean"""
    clip: Optional[float] = key(None, gt=0)
    """clip scores to [-clip, clip]"""
    clip_first: bool = key(False)
    """clip before scaling (as trlX), not after it (as TRL)"""
    missing_eos_penalty: Optional[float] = key(None, ge=0)
    """penalty of a response that never ended"""
    min_response_length: Optional[int] = key(None, ge=1)
    """responses with fewer tokens get min_response_penalty"""
    min_response_penalty: Optional[float] = key(None, ge=0)
    """penalty of a response that is too short"""
    penalty_mode: str = key("subtract", choices=("subtract", "replace"))
    """these two penalties come off the score (as in TRL), or take its place (as in torchtune)"""
    overlong_buffer: Optional[int] = key(None, ge=1)
    """last tokens below max_new_tokens, or env.max_tokens, over which DAPO's penalty for length
    rises from 0 to overlong_penalty"""
    overlong_penalty: Optional[float] = key(None, ge=0)
    """largest penalty for length, subtracted (default: 1)"""
    on_invalid: str = key("error", choices=("error", "skip"))
    """what a None or NaN score does: stop, or drop the sample"""
    ranks: str = key("auto", choices=("auto", "all", "first"))
    """with several processes: each scores its share, or the first scores all samples (auto: all,
    unless a function says needs_all_samples)"""
    timeout: Optional[float] = key(None, gt=0, le=LONGEST_WAIT, on_resume="harmless")
    """seconds one reward call may take"""
    retries: int = key(0, ge=0, on_resume="harmless")
    """how often a reward call that raised is tried again"""
    overlap: str = key("auto", choices=("auto", "always", "never"), on_resume="harmless")
    """score a chunk in a thread while the next is generated (auto: where the reward waits for
    others, as http does)"""


@dataclass
class EvalPromptsConfig:
    """Evaluation prompts. A key left null takes the value of the same key in ``prompts``."""

    path: Any = key(None, each=str, holds="rows")
    """file, folder, task or Hub data set, as of prompts.path, which is the default"""
    name: Optional[str] = key(None)
    """Hub data set configuration"""
    split: Optional[str] = key(None)
    """split of the data set"""
    column: Optional[str] = key(None)
    """column that holds the prompt"""
    columns: Optional[list[str]] = key(None)
    """metadata columns handed to the reward by name"""
    kwargs: dict[str, Any] = key({}, holds="arguments")
    """arguments of a task, beside those of prompts.kwargs, such as another seed"""
    items: Optional[list[Any]] = key(None)
    """prompts given inline"""
    limit: int = key(64, ge=1)
    """how many evaluation prompts, fixed for the whole run"""
    repeat: int = key(1, ge=1)
    """how many responses to each evaluation prompt"""
    first_words: Optional[int] = key(None, ge=1)
    """keep only the first n words"""
    length_sampler: Optional[list[int]] = key(None, ge=1)
    """[min, max] tokens kept, drawn per prompt"""
    template: Optional[str] = key(None)
    """text with {prompt} and {column} placeholders"""
    chat: Optional[bool] = key(None)
    """render with the tokenizer's chat template"""
    tools: Optional[str] = key(None)
    """column of descriptions of functions, which the chat template is told of"""
    max_length: Optional[int] = key(None, ge=1)
    """longest prompt in tokens"""
    overlong: Optional[str] = key(None, choices=("cut", "drop"))
    """'cut' a prompt that is longer, or 'drop' it"""
    truncation_side: Optional[str] = key(None, choices=("left", "right"))
    """which end of a long prompt is cut"""


MIX_KEYS = ("path", "weight", "kwargs", "name", "split", "column", "columns", "limit", "template")
"""keys of an entry of ``prompts.mix``"""
SOURCE = "source"
"""metadata column with the name of a prompt's source in a mix"""


@dataclass
class PromptsConfig:
    path: Any = key(None, each=str, holds="rows")
    """json, jsonl, csv, tsv, parquet or txt file, a pattern or list of such, an address of one, a
    folder, also one saved by `datasets`, a Hub data set, or a task: reasoning_gym:NAME"""
    kwargs: dict[str, Any] = key({}, holds="arguments")
    """arguments of the task: size, seed (default 0), and those of its difficulty"""
    name: Optional[str] = key(None)
    """configuration of a data set on the Hub, or of a folder"""
    split: str = key("train")
    """split of the data set; splits can be added: train+test"""
    column: str = key("prompt")
    """column that holds the prompt"""
    columns: Optional[list[str]] = key(None)
    """metadata columns handed to the reward by name (default: all others)"""
    items: Optional[list[Any]] = key(None)
    """prompts given inline: texts, or mappings with a 'prompt' key and metadata"""
    mix: dict[str, Any] = key({})
    """in place of path, several sources, each by a name: path, its weight (1) and, where they
    differ from those of prompts, kwargs, name, split, column, columns, limit and template"""
    limit: Optional[int] = key(None, ge=1)
    """use only the first n prompts"""
    first_words: Optional[int] = key(None, ge=1)
    """keep only the first n words"""
    length_sampler: Optional[list[int]] = key(None, ge=1)
    """[min, max] tokens kept, drawn per prompt"""
    template: Optional[str] = key(None)
    """text with {prompt} and {column} placeholders"""
    chat: Optional[bool] = key(None)
    """render with the tokenizer's chat template (default: if ppocli trained the model that way)"""
    tools: Optional[str] = key(None)
    """column of descriptions of functions (JSON schemas), which the chat template is told of"""
    max_length: Optional[int] = key(None, ge=1)
    """longest prompt in tokens (default: what fits the model beside max_new_tokens)"""
    overlong: str = key("cut", choices=("cut", "drop"))
    """'cut' a prompt that is longer than that, or 'drop' it"""
    truncation_side: str = key("left", choices=("left", "right"))
    """which end of a long prompt is cut"""
    shuffle: bool = key(True)
    """draw a new order every epoch from the seed"""
    eval: EvalPromptsConfig = key(EvalPromptsConfig)
    """the evaluation prompts"""


@dataclass
class EvalGenerationConfig:
    """Overrides of ``generation`` at evaluation. Null: as in training."""

    max_new_tokens: Optional[int] = key(None, ge=1)
    """longest response in tokens"""
    min_new_tokens: Optional[int] = key(None, ge=0)
    """no stop token before this many tokens"""
    temperature: Optional[float] = key(None, gt=0)
    """softmax temperature"""
    top_k: Optional[int] = key(None, ge=0)
    """sample among the k likeliest tokens (0: all)"""
    top_p: Optional[float] = key(None, gt=0, le=1)
    """nucleus sampling (1: all)"""
    min_p: Optional[float] = key(None, ge=0, le=1)
    """leave out tokens below this share of the likeliest one's probability (0: none)"""
    repetition_penalty: Optional[float] = key(None, gt=0)
    """make tokens less likely that are there already (1: off)"""
    do_sample: Optional[bool] = key(None)
    """sample, or take the likeliest token"""


@dataclass
class GenerationConfig:
    max_new_tokens: int = key(32, ge=1)
    """longest response in tokens"""
    min_new_tokens: int = key(0, ge=0)
    """no stop token before this many tokens, and stop sequences count only from there on"""
    temperature: float = key(1.0, gt=0)
    """softmax temperature; policy and reference use it too"""
    top_k: int = key(0, ge=0)
    """sample among the k likeliest tokens (0: all)"""
    top_p: float = key(1.0, gt=0, le=1)
    """nucleus sampling (1: all)"""
    min_p: float = key(0.0, ge=0, le=1)
    """leave out tokens below this share of the likeliest one's probability (0: none)"""
    repetition_penalty: float = key(1.0, gt=0)
    """divide the positive logits of tokens that are in the prompt or the response already, multiply
    the negative ones (1: off)"""
    do_sample: bool = key(True)
    """sample, or take the likeliest token"""
    stop_sequences: list[str] = key([])
    """texts that end a response; trimmed from what the reward sees"""
    stop_token_ids: list[int] = key([], ge=0)
    """token ids that end a response, besides the model's EOS"""
    ignore_eos: bool = key(False)
    """the model's EOS ends no response: only stop_sequences, stop_token_ids and max_new_tokens
    do"""
    length_sampler: Optional[list[int]] = key(None, ge=1)
    """[min, max] tokens that a rollout's response may have at most, drawn per response"""
    eval: EvalGenerationConfig = key(EvalGenerationConfig)
    """overrides at evaluation"""


@dataclass
class TaskConfig:
    fn: Optional[str] = key(None, holds="code")
    """'sft', 'reward_model' (better chosen by their commands, or with task=sft, which bring what
    goes with them), or the import path of a task of your own: a function or class that is called
    with a TaskSetup and returns a Task (default: PPO)"""
    kwargs: dict[str, Any] = key({}, holds="arguments")
    """further arguments of task.fn"""


@dataclass
class TrainConfig:
    seed: int = key(0, ge=0, lt=MAX_SEED, on_resume="refused")
    """seed of sampling, prompt order, value head and minibatch order"""
    run_name: Optional[str] = key(None, on_resume="harmless")
    """name of the run folder (default: recipe and time)"""
    output_dir: str = key("runs", on_resume="harmless", holds="path")
    """folder that holds the run folders"""
    resume: str = key("never", on_resume="harmless")
    """never, auto (go on if output_dir/run_name exists), or a run folder"""
    model: ModelConfig = key(ModelConfig)
    """the policy"""
    reward: RewardConfig = key(RewardConfig)
    """what is rewarded"""
    prompts: PromptsConfig = key(PromptsConfig)
    """what the policy answers to"""
    generation: GenerationConfig = key(GenerationConfig)
    """how responses are sampled"""
    rollout: RolloutConfig = key(RolloutConfig)
    """what samples them"""
    env: EnvConfig = key(EnvConfig)
    """what answers the policy in episodes of several turns"""
    task: TaskConfig = key(TaskConfig)
    """what is trained, where it is not PPO"""
    ppo: PPOConfig = key(PPOConfig)
    """the algorithm"""
    data: DataConfig = key(DataConfig)
    """what ppocli sft and reward-model train on"""
    sft: SFTConfig = key(SFTConfig)
    """supervised fine-tuning"""
    reward_model: RewardModelConfig = key(RewardModelConfig)
    """training a reward model"""
    hardware: HardwareConfig = key(HardwareConfig)
    """where it runs"""
    eval: EvalConfig = key(EvalConfig)
    """evaluation during training"""
    checkpoint: CheckpointConfig = key(CheckpointConfig)
    """what is kept on disk"""
    tracking: TrackingConfig = key(TrackingConfig)
    """what is logged"""
    sweep: SweepConfig = key(SweepConfig)
    """how `ppocli train -m` finds its jobs"""


def rewards_of(reward: RewardConfig) -> list[tuple[str, Any, Any]]:
    """(key, function, its arguments) of ``reward`` itself, then of each of ``reward.fns`` that is
    a mapping as it should be; None for what isn't given."""
    return [("reward", reward.fn, reward.kwargs), *(
        (f"reward.fns.{name}", entry.get("fn"), entry.get("kwargs"))
        for name, entry in reward.fns.items() if isinstance(entry, dict))]
