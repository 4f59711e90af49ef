"""Does every kind of training learn? Runs them over a few seeds and writes the table of the docs.

    python benchmarks/kinds.py --out docs/kinds.md        # all kinds, three seeds each
    python benchmarks/kinds.py lora grpo --seeds 1 --set ppo.optimizer.lr=2e-4

All but one are trlX's random walks: the recipe with the words shown, and beside it what the same
weights reach when they are taught the shortest walks (``ceilings.py``). The encoder-decoder is a
small T5 with random weights, whose reward is the share of vowels among the letters of its answer, 1
at most.
Every run is a whole ``ppocli train`` in a process of its own.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import mean

from ceilings import ceiling
from machine import provenance
from tables import marks, write_between

WALKS = "+recipe=randomwalks"
PLAIN = "ppo.whiten_advantages=null ppo.positive_nll_coef=0"
TOP2 = "model.num_layers_unfrozen=2"
LORA = "model.peft.type=lora model.peft.r=16 model.peft.target_modules=[c_attn,c_proj,c_fc]"
NORM = "model.peft.lora_alpha=8 model.peft.modules_to_save=[ln_f]"
ALONE = f"{LORA} model.peft.lora_alpha=32"
KINDS = {
    "full": ("all weights", WALKS),
    "top2": ("top 2 of 6 layers, shared trunk", f"{WALKS}_top2"),
    "branch": ("critic with 2 layers of its own", f"{WALKS} model.value.kind=branch "
               f"model.value.num_layers_unfrozen=2 {PLAIN}"),
    "critic": ("critic of its own", f"{WALKS} model.value.kind=model {PLAIN}"),
    "lora": ("LoRA and the final norm, reference = adapter off", f"{WALKS}_lora"),
    "lora_alone": ("LoRA alone", f"{WALKS} {ALONE} ppo.optimizer.lr=1e-3 {PLAIN}"),
    "grpo": ("GRPO, 4 samples per prompt", f"{WALKS} ppo.advantage=grpo ppo.n=4 "
             "ppo.kl_in=loss ppo.positive_nll_coef=0.6"),
    "rloo": ("RLOO, 4 samples per prompt", f"{WALKS} ppo.advantage=rloo ppo.n=4"),
    "reinforce_pp": ("REINFORCE++", f"{WALKS} ppo.advantage=reinforce_pp "
                     "ppo.whiten_advantages=true"),
    "t5": ("encoder-decoder (T5), share of vowels",
           "model.path=./t5 prompts=reviews reward.fn=vowels.py:vowels ppo.total_episodes=3072 "
           "ppo.num_rollouts=64 ppo.mini_batch_size=32 ppo.optimizer.lr=3e-3 "
           "ppo.init_kl_coef=0.001 ppo.kl_in=reward ppo.step_kl=null ppo.lam=0.95 "
           "generation.max_new_tokens=12 eval.every_steps=null "
           "checkpoint.every_steps=null"),
}
TRAINED = {"top2": TOP2, "lora": f"{LORA} {NORM}", "lora_alone": ALONE}
"""kind -> what says which weights train, where those aren't all of the random walks' model"""
VOWELS = """def vowels(outputs, **_):
    letters = [[c for c in text.lower() if c.isalpha()] for text in outputs]
    return [sum(c in "aeiou" for c in row) / max(len(row), 1) for row in letters]
"""


def prepare(folder: Path) -> None:
    """The T5 and its reward; weights are a function of a fixed seed."""
    import torch
    from transformers import AutoTokenizer, T5Config, T5ForConditionalGeneration

    from ppocli.builtin.names import resolve_builtin

    tokenizer = AutoTokenizer.from_pretrained(resolve_builtin("builtin:reviews"))
    pad = tokenizer.pad_token_id
    torch.manual_seed(0)
    T5ForConditionalGeneration(T5Config(
        vocab_size=len(tokenizer), d_model=64, d_kv=16, num_heads=4, d_ff=128, num_layers=2,
        num_decoder_layers=2, pad_token_id=pad, decoder_start_token_id=pad,
        eos_token_id=tokenizer.eos_token_id)).save_pretrained(folder / "t5")
    tokenizer.save_pretrained(folder / "t5")
    (folder / "vowels.py").write_text(VOWELS, encoding="utf-8")


def train(kind: str, seed: int, folder: Path, more: list[str]) -> dict[str, float]:
    """One run's figures."""
    name = f"{kind}-{seed}"
    words = [*KINDS[kind][1].split(), f"seed={seed}", f"run_name={name}", "hardware.device=cpu",
             "hardware.num_threads=1", *more]
    env = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-m", "ppocli", "train", *words], cwd=folder, env=env,
                          text=True, capture_output=True, check=False)
    if done.returncode:
        raise SystemExit(f"{name} failed ({done.returncode}):\n{done.stderr[-2000:]}")
    told = json.loads((folder / "runs" / name / "summary.json").read_text(encoding="utf-8"))
    figure = "metrics/optimality" if "metrics/optimality" in told["eval_after"] else "reward_mean"
    return {"before": told["eval_before"][figure], "after": told["eval_after"][figure],
            "kl": told["eval_after"]["kl_mean"], "memory": told["peak_memory_mib"],
            "seconds": sum(told["seconds"].values())}


def row(kind: str, found: list[dict[str, float]], best: str) -> str:
    """One line of the table: means, the lowest of the seeds, and the ceiling."""
    def average(name: str) -> float:
        return mean(one[name] for one in found)

    words = KINDS[kind][1].removeprefix(WALKS + " ") if KINDS[kind][1] != WALKS else "-"
    return (f"| {KINDS[kind][0]} | `{words}` | {len(found)} | {average('before'):.3f} | "
            f"{average('after'):.3f} | "
            f"{min(one['after'] for one in found):.3f} | {best} | {average('kl'):.2f} | "
            f"{average('memory'):.0f} | {average('seconds'):.0f} |")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kinds", nargs="*", default=list(KINDS), help=", ".join(KINDS))
    parser.add_argument("--seeds", nargs="+", type=int, default=[1, 2, 3])
    parser.add_argument("--set", nargs="*", default=[], help="more words for every run")
    parser.add_argument("--jobs", type=int, default=2, help="runs side by side, one thread each")
    parser.add_argument("--out", type=Path, help="write the table into this file, between "
                        f"its lines {' and '.join(marks('kinds'))}")
    args = parser.parse_args()
    lines = ["| what trains | words | seeds | before | after | lowest seed | ceiling | KL | MiB | "
             "seconds |", "|---|---|---|---|---|---|---|---|---|---|"]
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        prepare(folder)
        with ThreadPoolExecutor(args.jobs) as pool:
            runs = {kind: [pool.submit(train, kind, seed, folder, args.set)
                           for seed in args.seeds] for kind in args.kinds}
            taught = {words: pool.submit(ceiling, words.split(), args.seeds[0], folder)
                      for words in {TRAINED.get(kind, "") for kind in args.kinds if kind != "t5"}}
            for kind, futures in runs.items():
                best = "1" if kind == "t5" else f"{taught[TRAINED.get(kind, '')].result()[0]:.3f}"
                lines.append(row(kind, [future.result() for future in futures], best))
                print(lines[-1], flush=True)
    if args.out:
        seeds = ", ".join(map(str, args.seeds))
        write_between(args.out, "kinds", "\n".join(
            [*lines, "", f"Seeds {seeds}; {provenance('one thread a run')}"]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
