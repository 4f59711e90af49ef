"""Models with random weights, their tokenizer and prompts: made here, nothing is downloaded.

    python benchmarks/fixtures.py tiny build/bench/fixtures    # one model's folder

Every token of the tokenizer is a word, so a text has the same tokens whoever encodes it: trlX,
which encodes anew what it has decoded, trains on what it sampled.
"""

from __future__ import annotations

import json
import math
import random
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from workloads import SHAPES, TOKENIZER, TRLX, WORKLOADS, Shape, Workload

EOS = "<|endoftext|>"
CONSONANTS, VOWELS = "bcdfghjklmnpqrstvwxyz", "aeiou"


def words(count: int) -> list[str]:
    """``count`` different words that can be spoken; the same ones in every process."""
    draw = random.Random(7)
    found: dict[str, None] = {}
    while len(found) < count:
        syllables = range(draw.randint(1, 4))
        found["".join(draw.choice(CONSONANTS) + draw.choice(VOWELS) for _ in syllables)] = None
    return list(found)


def model_folder(name: str, root: Path) -> Path:
    """The folder of a model, made when it isn't there yet."""
    folder = root / name
    if not folder.is_dir():
        print(f"making {folder}", file=sys.stderr)
        # in a process of its own: this one stays small, see commands.run
        subprocess.run([sys.executable, __file__, name, str(root)], check=True)
    return folder


def prompt_file(work: Workload, root: Path) -> Path:
    """One batch of prompts as JSON lines, so that every iteration sees the same ones."""
    low, high = work.prompt_tokens
    path = root / f"prompts-{work.shape}-{work.batch}-{low}-{high}.jsonl"
    if not path.is_file():
        vocabulary = words(SHAPES[work.shape].vocabulary - 1)
        draw = random.Random(99)
        rows = [{"prompt": " ".join(draw.choices(vocabulary, k=draw.randint(low, high)))}
                for _ in range(work.batch)]
        root.mkdir(parents=True, exist_ok=True)
        path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def facts(folder: Path) -> dict[str, int]:
    """What a model's work is counted from: its parameters by part."""
    found: dict[str, int] = json.loads((folder / "facts.json").read_text(encoding="utf-8"))
    return found


def make(name: str, root: Path) -> None:
    """Write the folder of one model, as a whole or not at all."""
    import torch

    shape = SHAPES[name]
    unfinished = root / f".{name}"
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir(parents=True)
    torch.manual_seed(1234)
    model = _model(shape)
    if shape.eos_probability is not None:
        _let_it_end(model, shape)
    model.save_pretrained(unfinished)
    _save_tokenizer(shape, unfinished / TOKENIZER)
    if any(work.shape == name and "trlx" in work.systems for work in WORKLOADS.values()):
        trlx = unfinished / TRLX  # knows neither safetensors nor shards
        trlx.mkdir()
        shutil.copy(unfinished / "config.json", trlx)
        torch.save(dict(model.state_dict()), trlx / "pytorch_model.bin")
    (unfinished / "facts.json").write_text(json.dumps(_count(model, shape)), encoding="utf-8")
    unfinished.rename(root / name)


def _model(shape: Shape) -> Any:
    from transformers import (
        GPT2Config,
        GPT2LMHeadModel,
        LlamaConfig,
        LlamaForCausalLM,
        Qwen2Config,
        Qwen2ForCausalLM,
    )

    last = shape.vocabulary - 1
    ends: dict[str, Any] = {"bos_token_id": last, "eos_token_id": last, "pad_token_id": last}
    if shape.kind == "gpt2":  # no dropout: some systems would switch it off, others not
        return GPT2LMHeadModel(GPT2Config(
            vocab_size=shape.vocabulary, n_positions=shape.positions, n_embd=shape.width,
            n_layer=shape.layers, n_head=shape.heads, resid_pdrop=0.0, embd_pdrop=0.0,
            attn_pdrop=0.0, summary_first_dropout=0.0, **ends))
    same: dict[str, Any] = {"vocab_size": shape.vocabulary, "hidden_size": shape.width,
            "intermediate_size": shape.inner, "num_hidden_layers": shape.layers,
            "num_attention_heads": shape.heads, "num_key_value_heads": shape.kv_heads,
            "max_position_embeddings": shape.positions, **ends}
    if shape.kind == "llama":
        return LlamaForCausalLM(LlamaConfig(**same))
    return Qwen2ForCausalLM(Qwen2Config(**same, tie_word_embeddings=True))


def _let_it_end(model: Any, shape: Shape) -> None:
    """Raise the end's logit by the same at every position until its mean probability is as wanted.

    The last norm's bias is laid along the end's row of the head, which has no bias of its own. On
    other logits it adds chance, which softmax takes as it takes the rest.
    """
    import torch

    wanted = shape.eos_probability
    assert wanted is not None
    row = model.lm_head.weight[-1].detach()
    ids = torch.randint(shape.vocabulary - 1, (16, 128))
    height = 0.0
    with torch.no_grad():
        for _ in range(20):
            model.transformer.ln_f.bias.copy_(height * row / row.square().sum())
            found = float(model(ids).logits.softmax(-1)[..., -1].mean())
            height += math.log(wanted / (1 - wanted)) - math.log(found / (1 - found))
    assert abs(found - wanted) < 1e-4, found


def _save_tokenizer(shape: Shape, folder: Path) -> None:
    """Files that transformers 4 and 5 read alike."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    table = {word: number for number, word in enumerate([*words(shape.vocabulary - 1), EOS])}
    tokenizer = Tokenizer(models.WordLevel(table, unk_token=EOS))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens([EOS])
    folder.mkdir()
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({
        "tokenizer_class": "PreTrainedTokenizerFast", "bos_token": EOS, "eos_token": EOS,
        "pad_token": EOS, "unk_token": EOS, "padding_side": "left",
        "model_max_length": shape.positions, "clean_up_tokenization_spaces": False}),
        encoding="utf-8")


def _count(model: Any, shape: Shape) -> dict[str, int]:
    """Weights that meet every token, the head's, and all."""
    head = model.lm_head.weight
    embeddings = {id(head)} | {id(module.weight) for module in model.modules()
                               if type(module).__name__ == "Embedding"}
    body = sum(weight.numel() for weight in model.parameters()
               if weight.ndim == 2 and id(weight) not in embeddings)
    return {"layers": shape.layers, "width": shape.width, "body": body, "head": head.numel(),
            "parameters": sum(weight.numel() for weight in model.parameters())}


if __name__ == "__main__":
    make(sys.argv[1], Path(sys.argv[2]))
