"""A run rehearsed before it begins, and how ``ppocli validate --deep`` tells what came of it."""

from collections.abc import Iterator
from typing import Any

from ppocli.config.schema import TrainConfig
from ppocli.parallel.stop import StopFlag
from ppocli.tasks.rehearsal import rehearse
from ppocli.text import clean, figure


def rehearsed(cfg: TrainConfig, stop: StopFlag) -> tuple[dict[str, Any], list[str]]:
    """What came of a rehearsal: for a program, and in lines for a person.

    Raises:
        PpocliError, StopRequested: as :func:`ppocli.tasks.rehearsal.rehearse`.
    """
    found = rehearse(cfg, stop)
    return found, list(_told_data(found) if "examples" in found else _told_ppo(found))


def _told_data(found: dict[str, Any]) -> Iterator[str]:
    yield (f"loaded: {found['parameters']:,} parameters, {found['trainable']:,} trained, "
           f"{found['examples']} examples, on {found['device']} {found['precision']}")
    yield (f"gradient of the first {found['rows']} ({found['tokens']} tokens): " + ", ".join(
        f"{'norm' if name == 'grad_norm' else f'{name} loss'} {figure(value, 4)}"
        for name, value in found["terms"].items()))
    yield from _costs(found)
    yield f"peak memory: {found['peak_memory_mib']:.0f} MiB"


def _told_ppo(found: dict[str, Any]) -> Iterator[str]:
    yield (f"loaded: {found['parameters']:,} parameters, {found['trainable']:,} trained, "
           f"{found['prompts']} prompts, on {found['device']} {found['precision']}")
    yield f"first prompt as the model gets it ({found['prompt_tokens']} tokens):"
    yield f"  {clean(found['prompt'])}"
    for number, sample in enumerate(found["samples"], start=1):
        score = "none" if sample["score"] is None else f"{sample['score']:.4g}"
        ended = "ended" if sample["finished"] else "did not end"
        yield (f"sample {number}: score {score}, kl {figure(sample['kl'], 4)}, "
               f"{sample['response_tokens']} tokens, {ended}")
        yield f"  {clean(sample['prompt'])} → {clean(sample['response'])}"
    for kind, columns in (("reward", found["parts"] if len(found["parts"]) > 1 else {}),
                          ("metric", found["metrics"])):
        for name, values in columns.items():
            yield f"{kind} {name}: " + ", ".join(
                "none" if value is None else f"{value:.4g}" for value in values)
    if found["kl_per_token"] is not None:
        verdict = "as it must be before training" if found["agrees"] else (
            "WRONG: before training it must be 0; do model.dtype and hardware.precision differ?")
        yield f"KL to the reference: {figure(found['kl_per_token'], 6)} nats per token, {verdict}"
    if found["terms"] is None:
        yield "gradient: not tried, no sample has a score"
    else:
        policy, value, norm = (figure(found["terms"][name], 4)
                               for name in ("policy", "value", "grad_norm"))
        yield f"gradient: policy loss {policy}, value loss {value}, norm {norm}"
    yield from _costs(found)
    yield f"peak memory: {found['peak_memory_mib']:.0f} MiB with {len(found['samples'])} samples"


def _costs(found: dict[str, Any]) -> Iterator[str]:
    yield "seconds: " + ", ".join(f"{name} {seconds:.1f}"
                                  for name, seconds in found["seconds"].items())
