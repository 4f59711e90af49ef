"""Sample from one model by one system, and print what the rounds took: a JSON line.

    python benchmarks/peers/run_decode.py ours|transformers|vllm '{"model": ..., ...}'

Started by ``benchmarks/decode.py``. vLLM runs in an environment of its own.
"""

import json
import os
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

THREADS = 1


def ours(job: dict[str, Any], prompts: list[list[int]]) -> Callable[[], int]:
    """By ppocli's own loop, set up as a run sets it up."""
    import torch

    from ppocli.config.schema import HardwareConfig, ModelConfig
    from ppocli.distributed.host_memory import settle_freed_memory
    from ppocli.distributed.onednn import choose_gemm
    from ppocli.models.kernels import packed_weights, route_linears
    from ppocli.sampling.decode_state import Decoder
    from ppocli.sampling.decoding import load_decodable
    from ppocli.sampling.sampler import decode
    from ppocli.sampling.samples import SamplingSpec, uniform

    settle_freed_memory(sharded=False)
    torch.set_num_threads(THREADS)
    lm = load_decodable(ModelConfig(path=job["model"])).lm
    route_linears(lm, choose_gemm(HardwareConfig(precision=job["precision"])))
    amp = job["precision"] == "bf16"
    tokens = torch.tensor(prompts)
    decoder = Decoder(lm, SamplingSpec(max_new_tokens=job["new"], stop_ids=()))
    noise = uniform(0, 1, range(len(prompts)), job["new"])

    def once() -> int:
        with (packed_weights(lm, torch.bfloat16 if amp else torch.float32),
              torch.autocast("cpu", torch.bfloat16) if amp else nullcontext()):
            out, = decode(decoder, tokens, torch.ones_like(tokens, dtype=torch.bool), noise)
        return int(out.mask.sum())

    return once


def transformers(job: dict[str, Any], prompts: list[list[int]]) -> Callable[[], int]:
    """By ``generate``, with weights of the precision."""
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(THREADS)
    kind = torch.bfloat16 if job["precision"] == "bf16" else torch.float32
    lm = AutoModelForCausalLM.from_pretrained(job["model"], dtype=kind).eval()
    tokens = torch.tensor(prompts)

    def once() -> int:
        with torch.no_grad():
            out = lm.generate(tokens, attention_mask=torch.ones_like(tokens), do_sample=True,
                              max_new_tokens=job["new"], min_new_tokens=job["new"], top_k=0,
                              pad_token_id=0)
        return out.numel() - tokens.numel()

    return once


def vllm(job: dict[str, Any], prompts: list[list[int]]) -> Callable[[], int]:
    """By its offline class in this process, without compilation."""
    os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "1",
                   "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    from vllm import LLM, SamplingParams

    llm = LLM(job["model"], dtype="bfloat16" if job["precision"] == "bf16" else "float32",
              enforce_eager=True, enable_prefix_caching=False, max_num_seqs=len(prompts),
              max_model_len=len(prompts[0]) + job["new"], skip_tokenizer_init=True)
    params = SamplingParams(temperature=1.0, max_tokens=job["new"], ignore_eos=True, logprobs=0,
                            detokenize=False)

    def once() -> int:
        found = llm.generate([{"prompt_token_ids": ids} for ids in prompts], params,
                             use_tqdm=False)
        return sum(len(one.outputs[0].token_ids) for one in found)

    return once


def parts_of(once: Callable[[], int]) -> dict[str, float]:
    """Seconds that a round spends in each operation itself by torch's profiler, and what is left of
    its processor time under ``""``."""
    import torch

    torch.ones(2**29)  # room in the heap, where that is kept, for what the profiler notes
    start = time.process_time()
    with torch.profiler.profile() as profiler:
        once()
        took = time.process_time() - start
    found = {event.key: event.self_cpu_time_total / 1e6 for event in profiler.key_averages()}
    return found | {"": took - sum(found.values())}


def main() -> None:
    system, job = sys.argv[1], json.loads(sys.argv[2])
    prompts = [[5 + (7919 * (i * job["prompt"] + j)) % 2000 for j in range(job["prompt"])]
               for i in range(job["rows"])]
    once = {"ours": ours, "transformers": transformers, "vllm": vllm}[system](job, prompts)
    once()
    if job["parts"]:
        print("\n" + json.dumps(parts_of(once)), flush=True)
        return
    found = []
    for _ in range(job["rounds"]):
        start = time.process_time()
        tokens = once()
        found.append(tokens / (time.process_time() - start))
    print("\n" + json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
