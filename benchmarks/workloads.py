"""What is measured: models, amounts of work, and the systems that do it."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

Precision = Literal["fp32", "bf16"]
KL_COEF, GAMMA, LAM = 0.05, 1.0, 0.95
CLIP, CLIP_VALUE, VF_COEF = 0.2, 0.2, 0.1
EPOCHS = 4
TOKENIZER, TRLX = "tokenizer", "trlx"
"""folders in a model's folder: the tokenizer, apart from it since some models' names decide on the
tokenizer's class; and the weights as trlX wants them"""


@dataclass(frozen=True, slots=True)
class Shape:
    """A model with random weights; a word of the tokenizer is one token, whoever encodes it."""

    kind: Literal["gpt2", "llama", "qwen2"]
    layers: int
    width: int
    heads: int
    vocabulary: int
    positions: int
    kv_heads: int = 0
    inner: int = 0
    """width of the MLP; of a GPT-2 it is four times the width"""
    eos_probability: float | None = None
    """of the end at any token, so that lengths are about geometric; None leaves it at chance"""


SHAPES = {
    "tiny": Shape("gpt2", 4, 256, 4, 2048, 256),
    "tiny-ending": Shape("gpt2", 4, 256, 4, 2048, 256, eos_probability=1 / 32),
    "mid-ending": Shape("gpt2", 6, 512, 8, 8192, 256, eos_probability=1 / 32),
    "gpt2": Shape("gpt2", 12, 768, 12, 50257, 1024),
    "llama-60m": Shape("llama", 9, 512, 8, 32000, 512, kv_heads=4, inner=1376),
    "qwen-100m": Shape("qwen2", 12, 640, 10, 50257, 512, kv_heads=2, inner=2400),
    "llama-1b": Shape("llama", 22, 2048, 32, 32000, 512, kv_heads=4, inner=5632),
    "qwen-0.5b": Shape("qwen2", 24, 896, 14, 151936, 32768, kv_heads=2, inner=4864),
    "qwen-tiny": Shape("qwen2", 2, 64, 4, 512, 512, kv_heads=2, inner=128),
}


@dataclass(frozen=True, slots=True)
class Published:
    """What a public log says of a system on like work, on a machine of its own."""

    label: str
    batch: int
    step_seconds: float
    """mean of a step, without evaluations"""
    sample_tokens: float
    """mean of a prompt and its response"""
    response_tokens: float
    note: str
    """where the figures come from and what they were made on"""

    @property
    def tokens_per_second(self) -> float:
        """Tokens of prompts and responses over the time of a step."""
        return self.batch * self.sample_tokens / self.step_seconds


VERL_GSM8K = Published(
    "verl, its own log", 256, 66.28, 382.1, 278.5,
    "another machine, a GPU that the log doesn't name: means over the 435 steps of "
    "github.com/eric-haibin-lin/verl-data, branch experiments, "
    "gsm8k/Qwen2.5-0.5B-bsz256_2-prompt1024-resp512-0.567.log, vLLM in eager mode, micro-batches "
    "of 2")


@dataclass(frozen=True, slots=True)
class Workload:
    """One row of the comparison. Every system gets these numbers and the same prompts."""

    title: str
    shape: str
    batch: int
    mini_batch: int
    new_tokens: int
    prompt_tokens: tuple[int, int]
    """shortest and longest"""
    lr: float
    systems: Sequence[str] = ("ours", "classic", "experimental", "trlx")
    min_new_tokens: int | None = None
    """None forces every response to ``new_tokens``"""
    layers_unfrozen: int = -1
    precision: Precision = "fp32"
    peers_matmul: Literal["highest", "medium"] = "highest"
    """``torch.set_float32_matmul_precision`` of the peers"""
    device: Literal["cpu", "cuda"] = "cpu"
    warmup: int = 1
    """iterations that are not counted"""
    iterations: int = 1
    """that are counted, in each process"""
    epochs: int = EPOCHS
    chunk: int | None = field(default=None)
    """responses that ours generates at once (None: all)"""
    words: Sequence[str] = ()
    """more words for ``ppocli train``, which override those that all systems share"""
    published: Published | None = None
    """stands beside what is measured"""

    @property
    def rollouts(self) -> int:
        """How many must be scored: an iteration is the time between two of them."""
        return self.warmup + self.iterations + 1

    @property
    def shortest(self) -> int:
        """Fewest tokens of a response."""
        return self.new_tokens if self.min_new_tokens is None else self.min_new_tokens


_TINY = Workload("4 layers, 256 wide", "tiny", 64, 16, 32, (8, 16), 1e-3, iterations=3)
_GPT2 = Workload("GPT-2 124M", "gpt2", 16, 8, 32, (8, 16), 2e-5)
_MIXED = Workload("4 layers, 256 wide; responses of 4 to 128 tokens", "tiny-ending", 64, 16, 128,
                  (8, 16), 1e-6, min_new_tokens=4, iterations=3)
_TOP2: dict[str, Any] = {"layers_unfrozen": 2, "systems": ("ours", "trlx")}
_GPU = Workload("GPT-2 124M on a GPU, bf16", "gpt2", 512, 64, 128, (16, 64), 2e-5,
                precision="bf16", device="cuda", iterations=3)
# prompts of 103.6 tokens in the mean and responses of 278.5, as in the log; the recipe gsm8k says
# what else is verl's. Lengths are drawn: the model is random, and ends at chance only.
_GSM8K = Workload(
    "GSM8K-shaped PPO, Qwen2.5-0.5B's shape, a critic of the same, bf16", "qwen-0.5b", 256, 64, 512,
    (64, 143), 1e-6, systems=("ours",), min_new_tokens=45, precision="bf16", device="cuda",
    iterations=2, epochs=1, published=VERL_GSM8K, words=(
        "generation.length_sampler=[45,512]", "model.value.kind=model",
        "ppo.optimizer.value_lr=1e-5", "ppo.micro_batch_size=16", "ppo.max_grad_norm=1",
        "ppo.lam=1", "ppo.init_kl_coef=0.001", "ppo.cliprange_value=0.5", "ppo.ent_coef=0.001"))

_GSM8K_REHEARSAL = replace(
    _GSM8K, title="the same in small, to rehearse it", shape="qwen-tiny", batch=8, mini_batch=4,
    new_tokens=12, prompt_tokens=(4, 8), min_new_tokens=4, warmup=0, iterations=1, words=(
        *_GSM8K.words, "generation.length_sampler=[4,12]", "ppo.micro_batch_size=4"))

WORKLOADS = {
    "tiny": _TINY,
    "tiny-top2": replace(_TINY, title="4 layers, 256 wide, top 2 trained", **_TOP2),
    "gpt2": _GPT2,
    "gpt2-top2": replace(_GPT2, title="GPT-2 124M, top 2 trained", **_TOP2),
    "gpt2-medium": replace(_GPT2, title='GPT-2 124M, the peers with float32_matmul_precision '
                           '"medium"', peers_matmul="medium"),
    "gpt2-bf16": replace(_GPT2, title="GPT-2 124M, bf16 for all", precision="bf16"),
    "mixed": _MIXED,
    "mixed-mid": replace(_MIXED, title="6 layers, 512 wide; responses of 4 to 128 tokens",
                         shape="mid-ending", batch=32, mini_batch=8, iterations=1),
    "llama-60m": replace(_GPT2, title="Llama shape, 60M", shape="llama-60m"),
    "qwen-100m": replace(_GPT2, title="Qwen2 shape, 100M", shape="qwen-100m",
                         systems=("ours", "classic", "experimental")),
    "gpt2-gpu": _GPU,
    "gsm8k-gpu": _GSM8K,
    "gsm8k-rehearsal": _GSM8K_REHEARSAL,
    "llama-1b-gpu": replace(_GPU, title="Llama shape, 1.1B, on a GPU, bf16", shape="llama-1b"),
}


@dataclass(frozen=True, slots=True)
class Job:
    """What a runner of a peer is told, as JSON: the workload's numbers and where things lie."""

    model: str
    model_for_trlx: str
    tokenizer: str
    prompts: str
    stamps: str
    """file that the reward function writes, see ``peers/reward.py``"""
    threads: int
    seed: int
    batch: int
    mini_batch: int
    rollouts: int
    new_tokens: int
    min_new_tokens: int
    longest_prompt: int
    epochs: int
    lr: float
    kl_coef: float
    gamma: float
    lam: float
    clip: float
    clip_value: float
    vf_coef: float
    layers_unfrozen: int
    precision: str
    matmul: str
    device: str
    options: dict[str, str]
    """of the system, such as which value model it has"""

    def to_json(self) -> dict[str, object]:
        """All of it."""
        return asdict(self)


def job_of(work: Workload, *, model: Path, prompts: Path, stamps: Path, threads: int, seed: int,
           options: dict[str, str]) -> Job:
    """The job of one process."""
    return Job(
        model=str(model), model_for_trlx=str(model / TRLX), tokenizer=str(model / TOKENIZER),
        prompts=str(prompts), stamps=str(stamps), threads=threads, seed=seed,
        batch=work.batch, mini_batch=work.mini_batch, rollouts=work.rollouts,
        new_tokens=work.new_tokens, min_new_tokens=work.shortest,
        longest_prompt=work.prompt_tokens[1], epochs=work.epochs, lr=work.lr, kl_coef=KL_COEF,
        gamma=GAMMA, lam=LAM, clip=CLIP, clip_value=CLIP_VALUE, vf_coef=VF_COEF,
        layers_unfrozen=work.layers_unfrozen, precision=work.precision, matmul=work.peers_matmul,
        device=work.device, options=options)
