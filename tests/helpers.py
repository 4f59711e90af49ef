"""Small real things that many tests need: models, tokenizers, folders, runs of the command."""

import json
import os
import subprocess
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from itertools import product
from pathlib import Path
from socketserver import BaseServer
from threading import Thread
from typing import Any

import pytest
from warm import begin

WORDS = (
    "the", "a", "film", "plot", "actor", "was", "is", "not", "very", "good", "bad", "great",
    "awful", "fine", "dull", "warm", "cold", "and", "but", "so", "i", "you", "we", "it", "this",
    "that", "loved", "hated", "saw", "liked", ".", ",", "!")
PAIRS = ("t5", "bart")
"""kinds of encoder-decoder"""
DECODERS = ("gpt2", "llama", *(
    pytest.param(kind, marks=pytest.mark.slow)
    for kind in ("gpt_neox", "qwen3", "opt", "gptj", "qwen2", "mistral", "gemma", "phi")))
"""kinds of causal models with one stack of layers, as parameters of a test"""
SPECIAL = ("<pad>", "<eos>", "<bos>", "<unk>")


def mostly_slow(*axes: Iterable[Any], quick: Callable[..., bool]) -> list:
    """The product of the axes as cases of a test; those that aren't ``quick`` are marked slow."""
    return [pytest.param(*case, marks=() if quick(*case) else pytest.mark.slow)
            for case in product(*axes)]


def checked(*words: str, handed_in: frozenset[str] = frozenset()):
    """The configuration that words of ``ppocli train`` make, with what was said beside it."""
    from ppocli.config.command_words import read_words
    from ppocli.config.compose import check, compose

    return check(compose(read_words(words)), handed_in)


def make_tokenizer(*, pad: bool = True, bos: bool = False, size: int = 0):
    """A word-level tokenizer of ``WORDS``, filled up to ``size`` ids; without ``pad`` its EOS has
    to pad."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = (*SPECIAL, *WORDS)
    words += tuple(f"word{i}" for i in range(len(words), size))
    vocabulary = {word: i for i, word in enumerate(words)}
    inner = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    inner.decoder = decoders.WordPiece(prefix="##", cleanup=False)
    names = {"eos_token": "<eos>", "unk_token": "<unk>"}
    if pad:
        names["pad_token"] = "<pad>"
    if bos:
        names["bos_token"] = "<bos>"
    return PreTrainedTokenizerFast(tokenizer_object=inner, **names)


def model_config(kind: str = "gpt2", **over):
    """A configuration of two small layers with the vocabulary of :func:`make_tokenizer`."""
    from transformers import CONFIG_MAPPING

    common = {"vocab_size": len(SPECIAL) + len(WORDS), "bos_token_id": 2, "eos_token_id": 1,
              "pad_token_id": 0}
    if kind in _SHAPES:
        return CONFIG_MAPPING[kind](**{**common, **_SHAPES[kind], **over})
    shape = {"num_hidden_layers": 2, "hidden_size": 32, "num_attention_heads": 2,
             "intermediate_size": 48, "max_position_embeddings": 64}
    if kind in ("llama", "qwen2", "qwen3", "mistral", "gemma", "gemma2", "cohere", "granite"):
        shape["num_key_value_heads"] = 1
    if kind in ("gemma", "gemma2", "qwen3"):
        shape["head_dim"] = 16
    return CONFIG_MAPPING[kind](**{**common, **shape, **over})


_GPT = {"n_layer": 2, "n_embd": 32, "n_head": 2, "n_positions": 64}
_GEMMA = {"num_hidden_layers": 2, "hidden_size": 32, "intermediate_size": 48,
          "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16,
          "vocab_size": len(SPECIAL) + len(WORDS)}
_SHAPES = {
    "gpt2": _GPT, "gptj": {**_GPT, "rotary_dim": 8, "tie_word_embeddings": False},
    "t5": {"num_layers": 2, "num_decoder_layers": 2, "d_model": 32, "d_kv": 16, "num_heads": 2,
           "d_ff": 48, "decoder_start_token_id": 0},
    "bart": {"encoder_layers": 2, "decoder_layers": 2, "d_model": 32, "encoder_attention_heads": 2,
             "decoder_attention_heads": 2, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48,
             "max_position_embeddings": 64, "decoder_start_token_id": 2,
             "forced_eos_token_id": None},
    "led": {"encoder_layers": 2, "decoder_layers": 2, "d_model": 32, "encoder_attention_heads": 2,
            "decoder_attention_heads": 2, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48,
            "attention_window": 4, "max_encoder_position_embeddings": 64,
            "max_decoder_position_embeddings": 64},
    "t5gemma": {name: {**_GEMMA, "is_decoder": name == "decoder", "final_logit_softcapping": 2.0}
                for name in ("encoder", "decoder")},
    "opt": {"num_hidden_layers": 2, "hidden_size": 32, "num_attention_heads": 2, "ffn_dim": 48,
            "max_position_embeddings": 64, "word_embed_proj_dim": 32},
    "mamba": {"num_hidden_layers": 2, "hidden_size": 32, "state_size": 8},
    "rwkv": {"num_hidden_layers": 2, "hidden_size": 32, "attention_hidden_size": 32,
             "intermediate_size": 48, "rescale_every": 1},
    "bloom": {"n_layer": 2, "hidden_size": 32, "n_head": 2},
    "gemma3": {
        "text_config": {**_GEMMA, "sliding_window": 8},
        "vision_config": {"num_hidden_layers": 1, "hidden_size": 16, "intermediate_size": 16,
                          "num_attention_heads": 2, "image_size": 28, "patch_size": 14}},
    "mpt": {"n_layers": 2, "d_model": 32, "n_heads": 2, "max_seq_len": 64},
    "gpt_neo": {"num_layers": 2, "hidden_size": 32, "num_heads": 2, "window_size": 4,
                "attention_types": [[["global", "local"], 1]], "max_position_embeddings": 64}}
_SHAPES |= {"mt5": _SHAPES["t5"], "marian": _SHAPES["bart"], "pegasus": _SHAPES["bart"]}
"""of kinds whose sizes have names of their own"""


def make_lm(kind: str = "gpt2", *, seed: int = 0, gain: float = 4.0, **over):
    """A language model with random weights that ``gain`` makes prefer some tokens."""
    import torch
    from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM

    config = model_config(kind, **over)
    auto = AutoModelForSeq2SeqLM if config.is_encoder_decoder else AutoModelForCausalLM
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = auto.from_config(config)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.dim() > 1:
                    parameter.mul_(gain)
    return model


def snapshots(monkeypatch: pytest.MonkeyPatch, cache: Path, name: str, *branches: str
              ) -> list[Path]:
    """Offline, with a repository of the Hub in the cache: the folders to fill, one a branch."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(cache))
    repository = cache / f"models--{name.replace('/', '--')}"
    (repository / "refs").mkdir(parents=True)
    for number, branch in enumerate(branches):
        (repository / "refs" / branch).write_text(str(number) * 40)
    return [repository / "snapshots" / (str(number) * 40) for number in range(len(branches))]


def save_lm(folder: Path, kind: str = "gpt2", *, pad: bool = True, **over) -> Path:
    """A folder of :func:`make_lm`'s model with a tokenizer of as many ids."""
    make_lm(kind, **over).save_pretrained(folder)
    make_tokenizer(pad=pad, size=over.get("vocab_size", 0)).save_pretrained(folder)
    return folder


TEMPLATE = ("{% for m in messages %}{{ {'user': 'you', 'assistant': 'i', 'system': 'we'}[m.role] }}"
            " {{ m.content }} . {% endfor %}{% if add_generation_prompt %}i {% endif %}")


def save_talker(folder: Path, **over) -> Path:
    """A causal LM folder whose tokenizer has a chat template; positions can be as many as wanted:
    ``max_position_embeddings``."""
    save_lm(folder, "llama", **over)
    tokenizer = make_tokenizer()
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    return folder


def mask_of(lengths: list[int], width: int):
    """[B, width] bool, true in the first columns of each row."""
    import torch

    return torch.arange(width)[None, :] < torch.tensor(lengths)[:, None]


def write_prompts(path: Path, texts=None, **columns) -> Path:
    """A jsonl file of prompts with metadata columns."""
    texts = texts or ["the film", "i saw", "this plot was", "it", "the actor is very", "we liked a",
                      "you hated the", "that film was not"]
    rows = [{"prompt": text, **{name: values[i] for name, values in columns.items()}}
            for i, text in enumerate(texts)]
    return write_jsonl(path, rows)


def request_of(count: int, tokens: int = 2):
    """What a reward is asked for so many responses of so many tokens."""
    from ppocli.rewards.reward_records import RewardRequest

    return RewardRequest(prompts=[f"prompt{i} " for i in range(count)],
                         responses=[f"response{i}" for i in range(count)],
                         response_ids=[[7] * tokens for _ in range(count)], columns={},
                         tokenizer=None)


def environment(**over: str) -> dict[str, str]:
    """The environment of a command under test: offline, one thread, no terminal tricks."""
    # also what libraries and sessions set in this very process: with other variables than the
    # forking process has, each command would load the libraries anew (tests/warm.py)
    ours = ("PPOCLI_", "HF_", "DS_", "PYTORCH_", "TORCHINDUCTOR_", "PYTHONWARNINGS", "ACCELERATE_",
            "LRU_", "ONEDNN_")
    env = {k: v for k, v in os.environ.items() if k == "PPOCLI_KEY_FILE" or not k.startswith(ours)}
    env.update({"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false",
                "COLUMNS": "120", **over})
    return env


def ppocli(*words: str, cwd: Path, timeout: float = 240, code: int | None = None, **env: str
           ) -> subprocess.CompletedProcess[str]:
    """Run the command as a user does, in a process of its own, which has to end with this code."""
    process = begin(["-m", "ppocli", *words], cwd=cwd, env=environment(**env))
    try:
        out, err = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        process.kill()
        raise
    assert code is None or process.returncode == code, (process.returncode, out + err)
    assert code in (None, 1) or "Traceback" not in err, err
    return subprocess.CompletedProcess(words, process.returncode, out, err)


@contextmanager
def refused(kind: type[Exception], *words: str) -> Iterator[pytest.ExceptionInfo]:
    """The block has to end in an error of this kind that says these words."""
    with pytest.raises(kind) as caught:
        yield caught
    for word in words:
        assert word in str(caught.value), str(caught.value)


@contextmanager
def running(server: BaseServer) -> Iterator[str]:
    """The address of a server of this machine, which answers meanwhile."""
    thread = Thread(target=server.serve_forever, args=(0.02,))
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@contextmanager
def serving_reward(reward: Any, **settings: Any) -> Iterator[str]:
    """The address of ``ppocli serve-reward``'s server for a reward, in a thread."""
    from ppocli.rewards.serving import RewardServer

    server = RewardServer("127.0.0.1", 0, reward, **{"max_body": 2**20, **settings})
    thread = Thread(target=server.serve)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.port}"
    finally:
        server.stop()
        thread.join()


def jsonl(path: Path) -> list[dict]:
    """The rows of a JSON-lines file."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def write_jsonl(path: Path, rows: Iterable[object]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def read_json(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))


VOLATILE = ("time/", "cpu/", "tokens_per_second/", "memory/")
"""prefixes of figures that differ between two equal runs"""


def stable_rows(path: Path) -> list[dict]:
    """Metrics rows without the figures that two equal runs may differ in."""
    return [{k: v for k, v in row.items() if not k.startswith(VOLATILE)} for row in jsonl(path)]
