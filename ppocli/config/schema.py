"""The words a user may type: every config key with its type, default, range and one-line meaning.

These dataclasses, with those of ``schema_training``, are the only home of defaults and ranges.
Hydra composes into them (structured config), :mod:`ppocli.config.problems` reads the ranges from
the field metadata, and the engine receives plain instances. Nothing heavy is imported.
"""

from dataclasses import dataclass
from typing import Any, Optional

from omegaconf import MISSING

from ppocli.config.schema_training import DataConfig, PPOConfig, RewardModelConfig, SFTConfig, key


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
    sync_every: Optional[int] = key(None, "kind=copy: steps after which it becomes the policy of "
                                    "that moment (null: it stays as it starts)", ge=1)
    sync_alpha: float = key(1.0, "share of the policy in that; the rest stays what it was", gt=0,
                            le=1)
    shard: Optional[bool] = key(None, "keep a part of it on each process (default: under ZeRO 3)")


@dataclass
class ValueConfig:
    kind: str = key("head", "a 'head' on the policy's trunk, a 'branch' with top layers of its "
                    "own, or a 'model' of its own", choices=("head", "branch", "model"))
    path: Optional[str] = key(None, "kind=model: folder or Hub name, such as the reward model's "
                              "(default: model.path); any kind: a PPO run or a checkpoint of one, "
                              "as whose value function this one starts")
    num_layers_unfrozen: int = key(-1, "kind=branch: how many top layers of its own; kind=model: "
                                   "train only the top k layers (-1: all)", ge=-1)
    freeze_attention: bool = key(False, "kind=branch or model: leave its attention as it starts")


@dataclass
class ModelConfig:
    path: str = key(MISSING, "a folder, a Hub name, or builtin:reviews / builtin:randomwalks; an "
                    "adapter goes on under model.peft, and is merged without it")
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


REWARD_STYLES = ("ppocli", "trl", "trlx", "verl", "openrlhf")


@dataclass
class RewardConfig:
    fn: Optional[str] = key(None, "import path (pkg.mod:function, file.py:function), a class, or a "
                            "built-in's short name")
    kwargs: dict[str, Any] = key({}, "arguments bound to reward.fn")
    style: str = key("auto", "which library's way of calling a reward and reading its answer the "
                     "function was written for (auto: told by its parameters)",
                     choices=("auto", *REWARD_STYLES))
    fns: dict[str, Any] = key({}, "several rewards: name -> {fn, kwargs, weight, style}; summed, "
                              "logged apart")
    step_separator: Optional[str] = key(None, "text that ends a step of a response, \\n being a "
                                        "line break; rewards with a parameter steps score each of "
                                        "them")
    step_fn: Optional[str] = key(None, "in place of step_separator: words, or the import path of a "
                                 "function that returns for each response the texts of its steps")
    metric_fn: Optional[str] = key(None, "import path of a function returning a dict of lists, "
                                   "logged at evaluation")
    scale: str = key("none", "divide scores by a running std, or by ref_std", choices=(
        "none", "running", "ref"))
    ref_mean: Optional[float] = key(None, "subtracted from scores with scale=ref (default: nothing "
                                    "is, but with center what lies with the reward model)")
    ref_std: Optional[float] = key(None, "std of the reference scores (default: what lies with the "
                                   "reward model, else from the first rollout)", gt=0)
    center: bool = key(False, "take the mean off too: with scale=running the running one (TRL's "
                       "use_score_norm), with scale=ref ref_mean")
    clip: Optional[float] = key(None, "clip scores to [-clip, clip]", gt=0)
    clip_first: bool = key(False, "clip before scaling (as trlX), not after it (as TRL)")
    missing_eos_penalty: Optional[float] = key(None, "penalty of a response that never ended", ge=0)
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
    overlong: Optional[str] = key(None, "'cut' a prompt that is longer, or 'drop' it",
                                  choices=("cut", "drop"))
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
    overlong: str = key("cut", "'cut' a prompt that is longer than that, or 'drop' it",
                        choices=("cut", "drop"))
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
    min_p: Any = key(None, "leave out tokens below this share of the likeliest one's probability "
                     "(0: none)", each=float, ge=0, le=1)
    repetition_penalty: Any = key(None, "make tokens less likely that are there already (1: off)",
                                  each=float, gt=0)
    do_sample: Any = key(None, "sample, or take the likeliest token", each=bool)


@dataclass
class GenerationConfig:
    max_new_tokens: int = key(32, "longest response in tokens", ge=1)
    min_new_tokens: int = key(0, "no stop token before this many tokens, and stop sequences count "
                              "only from there on", ge=0)
    temperature: float = key(1.0, "softmax temperature; policy and reference use it too", gt=0)
    top_k: int = key(0, "sample among the k likeliest tokens (0: all)", ge=0)
    top_p: float = key(1.0, "nucleus sampling (1: all)", gt=0, le=1)
    min_p: float = key(0.0, "leave out tokens below this share of the likeliest one's probability "
                       "(0: none)", ge=0, le=1)
    repetition_penalty: float = key(1.0, "divide the positive logits of tokens that are in the "
                                    "prompt or the response already, multiply the negative ones "
                                    "(1: off)", gt=0)
    do_sample: bool = key(True, "sample, or take the likeliest token")
    stop_sequences: list[str] = key([], "texts that end a response; trimmed from what the reward "
                                    "sees")
    stop_token_ids: list[int] = key([], "token ids that end a response, besides the model's EOS",
                                    ge=0)
    ignore_eos: bool = key(False, "the model's EOS ends no response: only stop_sequences, "
                           "stop_token_ids and max_new_tokens do")
    length_sampler: Optional[list[int]] = key(None, "[min, max] tokens that a rollout's response "
                                              "may have at most, drawn per response", ge=1)
    eval: EvalGenerationConfig = key(EvalGenerationConfig, "overrides at evaluation; one of them "
                                     "may be a list, to evaluate with each of its values")


@dataclass
class TaskConfig:
    fn: Optional[str] = key(None, "'sft', 'reward_model' (better chosen by their commands, or with "
                            "task=sft, which bring what goes with them), or the import path of a "
                            "task of your own: a function or class that is called with a TaskSetup "
                            "and returns a Task (default: PPO)")
    kwargs: dict[str, Any] = key({}, "further arguments of task.fn")


@dataclass
class RolloutConfig:
    engine: str = key("decode", "where samples come from: our 'decode' loop (transformers' for "
                      "models that it can't step), always 'transformers', servers of 'vllm', or "
                      "the import path of a sampler of your own, which is called with a "
                      "SamplerSetup")
    kwargs: dict[str, Any] = key({}, "further arguments of a sampler of your own")
    urls: list[str] = key([], "list of vLLM servers, http://HOST:PORT; ppocli vllm-command prints "
                          "how to start one")
    token_env: Optional[str] = key(None, "name of the environment variable that holds the token "
                                   "the servers ask for")
    timeout: float = key(600.0, "seconds that a server has for a response, or to take new weights",
                         gt=0)
    concurrency: int = key(128, "responses that each process has under way at each server", ge=1)
    weights_dir: Optional[str] = key(None, "folder through which servers get the weights, under "
                                     "the same path there (default: a temporary one)")
    server_args: list[str] = key([], "list of further words of the servers' command: "
                                 "[--tensor-parallel-size,'2']")
    ahead: int = key(0, "1: servers sample for the next step while this one is trained on, with "
                     "weights from before it", ge=0, le=1)
    launch: bool = key(False, "start the servers of rollout.urls beside the run, and end them with "
                       "it")
    python: Optional[str] = key(None, "the Python of the environment that has vLLM, for "
                                "rollout.launch")


@dataclass
class EnvConfig:
    fn: Optional[str] = key(None, "import path of a class whose objects answer the policy turn by "
                            "turn (reset, step), 'guess_number', 'calculator', or 'tools' for the "
                            "functions of env.tools")
    kwargs: dict[str, Any] = key({}, "arguments of that class")
    adapter: Optional[str] = key(None, "the library that the class was written for",
                                 choices=("trl", "openrlhf"))
    tools: list[str] = key([], "import paths of functions that the policy may call by the chat "
                           "template's syntax, with fn=tools")
    max_turns: int = key(8, "most turns of the policy in an episode", ge=1)
    max_tokens: int = key(256, "most tokens of an episode behind its prompt, observations "
                          "included; generation.max_new_tokens is the limit of one turn", ge=1)
    timeout: Optional[float] = key(None, "seconds that one call of reset or step may take", gt=0)
    retries: int = key(0, "how often a call that raised is tried again", ge=0)
    workers: int = key(1, "calls at a time, each in a thread; async ones all wait together", ge=1)
    on_error: str = key("stop", "what a failed call does: stop the run, end (truncate) the episode "
                        "with the rewards so far, or drop it from the update",
                        choices=("stop", "truncate", "drop"))


@dataclass
class HardwareConfig:
    device: str = key("auto", "where to compute", choices=("auto", "cpu", "cuda"))
    precision: str = key("fp32", "compute type; optimizer state stays fp32",
                         choices=("fp32", "bf16"))
    weights: str = key("fp32", "storage type of the policy's weights and their gradients; bf16 "
                       "needs precision=bf16 and keeps fp32 master copies, half of each in the "
                       "weights and half in the optimizer", choices=("fp32", "bf16"))
    gemm: str = key("auto", "linear layers on a CPU: torch's default products, or oneDNN's (auto: "
                    "whichever is faster, measured at the start)",
                    choices=("auto", "default", "onednn"))
    frozen_states_mib: int = key(2048, "memory for what the frozen layers under "
                                 "model.num_layers_unfrozen make of a rollout, once for all passes "
                                 "over it (0: again in each)", ge=0)
    num_threads: Optional[int] = key(None, "CPU threads of each process (null or auto: as many as "
                                     "pay off, measured at the start)", ge=1)
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
    memory_check: str = key("error", "what a run does that surely does not fit into memory or onto "
                            "the disk, before it loads weights: stop, warn, or not look",
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
    metric: str = key("reward_mean", "evaluation figure that decides what is best: reward_mean or "
                      "metrics/NAME of metric_fn; of sft loss, of a reward model accuracy or loss")
    background: str = key("auto", "write checkpoints while training goes on, from a copy in host "
                          "memory: where there is room for it, always, or never",
                          choices=("auto", "always", "never"))


@dataclass
class TrackingConfig:
    trackers: list[str] = key(["tensorboard"], "list of where figures go beside metrics.jsonl; "
                              "wandb and trackio are extras: pip install 'ppocli[wandb]'; an "
                              "import path, such as my_trackers.py:Csv, is a class of your own",
                              choices=("tensorboard", "wandb", "trackio"), import_path=True)
    project: Optional[str] = key(None, "project of wandb and trackio (default: WANDB_PROJECT for "
                                 "wandb, else ppocli)")
    log_rollouts: bool = key(False, "write every rollout sample to samples.jsonl, not only "
                             "evaluation samples")
    rollout_tokens: bool = key(False, "with log_rollouts: also token ids, and logprobs, values and "
                               "KL of each token")


@dataclass
class SweepConfig:
    search: str = key("grid", "jobs of `-m`: every combination of the values; values drawn from "
                      "ranges (random); or those that earlier jobs promise most of (optuna)",
                      choices=("grid", "random", "optuna"))
    trials: int = key(20, "jobs of a search", ge=1)
    metric: Any = key(None, "figure of the evaluation after training that is searched "
                                "for, or a list of several (default: checkpoint.metric)", each=str)
    direction: Any = key(None, "minimize or maximize, for each metric (default: minimize for "
                         "kl_mean and losses)", choices=("minimize", "maximize"), each=str)
    prune: bool = key(False, "stop jobs whose evaluations during training are worse than half of "
                      "the earlier jobs' at that step")
    seed: int = key(0, "of what is drawn", ge=0)
    jobs: int = key(1, "jobs that run at a time, each on GPUs of its own or on a share of the "
                    "cores", ge=1)
    launcher: str = key("local", "what runs them: this machine, or Slurm (ppocli[slurm])",
                        choices=("local", "slurm"))
    slurm: dict[str, Any] = key({}, "what Slurm is asked for, as submitit calls it: timeout_min")


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
    rollout: RolloutConfig = key(RolloutConfig, "what samples them")
    env: EnvConfig = key(EnvConfig, "what answers the policy in episodes of several turns")
    task: TaskConfig = key(TaskConfig, "what is trained, where it is not PPO")
    ppo: PPOConfig = key(PPOConfig, "the algorithm")
    data: DataConfig = key(DataConfig, "what ppocli sft and reward-model train on")
    sft: SFTConfig = key(SFTConfig, "supervised fine-tuning")
    reward_model: RewardModelConfig = key(RewardModelConfig, "training a reward model")
    hardware: HardwareConfig = key(HardwareConfig, "where it runs")
    eval: EvalConfig = key(EvalConfig, "evaluation during training")
    checkpoint: CheckpointConfig = key(CheckpointConfig, "what is kept on disk")
    tracking: TrackingConfig = key(TrackingConfig, "what is logged")
    sweep: SweepConfig = key(SweepConfig, "how `ppocli train -m` finds its jobs")


def reference_kind(model: ModelConfig) -> str:
    """``copy``, ``shared``, ``adapter`` or ``none``: what ``model.reference.kind`` comes to."""
    if model.reference.kind != "auto":
        return model.reference.kind
    if model.reference.path is not None:
        return "copy"
    if model.peft:
        return "adapter"
    return "shared" if model.num_layers_unfrozen >= 0 else "copy"
