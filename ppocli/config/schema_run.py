"""Keys of what a training runs with: samplers, environments, the machine, evaluations, checkpoints,
trackers; and of sweeps."""

from dataclasses import dataclass
from typing import Any, Optional

from ppocli.config.schema_training import LONGEST_WAIT, MAX_SEED, key

TRACKERS = ("wandb", "trackio", "mlflow", "swanlab", "comet_ml", "clearml")
"""trackers of accelerate's, by their libraries' names"""


@dataclass
class RolloutConfig:
    engine: str = key("decode", holds="code")
    """where samples come from: our 'decode' loop (transformers' for models that it can't step),
    servers of 'vllm', or the import path of a sampler of your own, which is called with a
    SamplerSetup"""
    kwargs: dict[str, Any] = key({}, holds="arguments")
    """further arguments of a sampler of your own"""
    urls: list[str] = key([])
    """list of vLLM servers, http://HOST:PORT; ppocli vllm-command prints how to start one"""
    token_env: Optional[str] = key(None)
    """name of the environment variable that holds the token the servers ask for"""
    timeout: float = key(600.0, gt=0, le=LONGEST_WAIT)
    """seconds that a server has for a response, or to take new weights"""
    concurrency: int = key(128, ge=1)
    """responses that each process has under way at each server"""
    weights_dir: Optional[str] = key(None)
    """folder in which servers find new weights, under the same path there (default: a temporary
    one)"""
    server_args: list[str] = key([])
    """list of further words of the servers' command: [--tensor-parallel-size,'2']"""
    ahead: int = key(0, ge=0, le=1)
    """1: servers sample for the next step while this one is trained on, with weights from before
    it"""
    sleep: bool = key(False)
    """servers give back their GPU's memory while the policy trains on the same GPU, and take it for
    rollouts again"""
    launch: bool = key(False)
    """start the servers of rollout.urls beside the run, and end them with it"""
    python: Optional[str] = key(None, holds="path")
    """the Python of the environment that has vLLM, for rollout.launch"""


@dataclass
class EnvConfig:
    fn: Optional[str] = key(None, holds="code")
    """import path of a class whose objects answer the policy turn by turn (reset, step),
    'guess_number', 'calculator', 'openenv' for a server of OpenEnv, or 'tools' for the functions of
    env.tools"""
    kwargs: dict[str, Any] = key({}, holds="arguments")
    """arguments of that class"""
    adapter: Optional[str] = key(None, choices=("trl", "openrlhf"))
    """the library that the class was written for"""
    tools: list[str] = key([], holds="code")
    """import paths of functions that the policy may call by the chat template's syntax, with
    fn=tools"""
    max_turns: int = key(8, ge=1)
    """most turns of the policy in an episode"""
    max_tokens: int = key(256, ge=1)
    """most tokens of an episode behind its prompt, observations included; generation.max_new_tokens
    is the limit of one turn"""
    timeout: Optional[float] = key(None, gt=0, le=LONGEST_WAIT)
    """seconds that one call of reset or step may take"""
    retries: int = key(0, ge=0)
    """how often a call that raised is tried again"""
    workers: int = key(1, ge=1)
    """calls at a time, each in a thread; async ones all wait together"""
    on_error: str = key("stop", choices=("stop", "truncate", "drop"))
    """what a failed call does: stop the run, end (truncate) the episode with the rewards so far, or
    drop it from the update"""


@dataclass
class HardwareConfig:
    device: str = key("auto", choices=("auto", "cpu", "cuda"))
    """where to compute"""
    precision: str = key("fp32", choices=("fp32", "bf16"), on_resume="refused")
    """compute type; optimizer state stays fp32"""
    weights: str = key("fp32", choices=("fp32", "bf16"), on_resume="refused")
    """storage type of the policy's weights and their gradients; bf16 needs precision=bf16 and keeps
    fp32 master copies, half of each in the weights and half in the optimizer"""
    gemm: str = key("auto", choices=("auto", "default", "decoding", "onednn"))
    """linear layers on a CPU: torch's default products, oneDNN's in decoding alone, or oneDNN's
    (auto: what is fastest on processors of this kind)"""
    cuda_graphs: bool = key(True, on_resume="harmless")
    """on a GPU, record what decoding a token takes once and replay it for the tokens after it"""
    frozen_states_mib: int = key(2048, ge=0)
    """memory for what the frozen layers under model.num_layers_unfrozen make of a rollout, once for
    all passes over it (0: again in each)"""
    num_threads: Optional[int] = key(None, ge=1, le=2**15, on_resume="harmless")
    """CPU threads of each process (null: OMP_NUM_THREADS, or one per core)"""
    num_processes: int = key(1, ge=1)
    """processes on each node: one a GPU, or several on a CPU"""
    num_nodes: int = key(1, ge=1)
    """machines, on each of which torchrun or srun starts the processes"""
    zero_stage: int = key(0, ge=0, le=3)
    """DeepSpeed ZeRO: 0 replicates everything, 1 shards the optimizer, 2 gradients too, 3 weights
    too"""
    offload_optimizer: bool = key(False)
    """keep optimizer state in host memory (ZeRO 1 to 3)"""
    offload_param: bool = key(False)
    """keep weights in host memory (ZeRO 3)"""
    gather_for_generation: bool = key(True, on_resume="harmless")
    """ZeRO 3: whole weights on each process in rollouts"""
    deepspeed_config: Optional[str] = key(None, holds="path")
    """a DeepSpeed JSON file of your own; what it leaves open is filled in"""
    memory_check: str = key("error", choices=("error", "warn", "off"), on_resume="harmless")
    """what a run does that surely does not fit into memory or onto the disk, before it loads
    weights: stop, warn, or not look"""
    timeout_seconds: int = key(1800, ge=1, le=LONGEST_WAIT, on_resume="harmless")
    """how long a process waits for the others"""


@dataclass
class EvalConfig:
    every_steps: Optional[int] = key(10, ge=1)
    """evaluate every n steps (null: only at start and end)"""
    at_start: bool = key(True)
    """evaluate before training"""


@dataclass
class CheckpointConfig:
    every_steps: Optional[int] = key(10, ge=1)
    """save every n steps (null: only at the end)"""
    every_minutes: Optional[float] = key(None, gt=0)
    """save at least this often"""
    keep_last: int = key(2, ge=1)
    """how many of the newest checkpoints stay on disk"""
    keep_best: bool = key(True)
    """also keep the checkpoint with the best evaluation"""
    metric: str = key("reward_mean")
    """evaluation figure that decides what is best: reward_mean or metrics/NAME of metric_fn; of sft
    loss, of a reward model accuracy or loss"""


@dataclass
class TrackingConfig:
    trackers: list[str] = key(["tensorboard"], choices=("tensorboard", *TRACKERS),
                              import_path=True, holds="code")
    """list of where figures go beside metrics.jsonl; all but tensorboard are extras of their names:
    pip install 'ppocli[wandb]'; an import path, such as my_trackers.py:Csv, is a class of your
    own"""
    project: Optional[str] = key(None)
    """project in the tracker (default: WANDB_PROJECT for wandb, else ppocli)"""
    log_rollouts: bool = key(False)
    """write every rollout sample to samples.jsonl, not only evaluation samples"""
    rollout_tokens: bool = key(False)
    """with log_rollouts: also token ids, and logprobs, values and KL of each token"""


@dataclass
class SweepConfig:
    search: str = key("grid", choices=("grid", "random", "optuna"))
    """how `-m` chooses values: every combination (grid), random values of ranges (random), or
    values that are promising after the earlier jobs (optuna)"""
    trials: int = key(20, ge=1)
    """number of jobs of a search"""
    metric: Any = key(None, each=str)
    """metric of the evaluation after training that a search optimises, or a list of several
    (default: checkpoint.metric)"""
    direction: Any = key(None, choices=("minimize", "maximize"), each=str)
    """minimize or maximize, for each metric (default: minimize for kl_mean and losses)"""
    seed: int = key(0, ge=0, lt=MAX_SEED)
    """seed of a search"""
