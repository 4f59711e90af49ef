"""What ``ppocli validate`` tells of a run or a sweep, with ``--deep`` of its rehearsal, too."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

from ppocli.cli import output
from ppocli.cli.examine import examine
from ppocli.config import secrets
from ppocli.display.results import put
from ppocli.errors import PpocliError
from ppocli.text import clean, figure

ORDER = (2, 3, 7, 6, 5)
"""exit codes, the one that decides first; others come last"""


def validate_words(words: Sequence[str], *, deep: bool = False, as_json: bool = False) -> None:
    """Check everything that can be checked about a run or a sweep; nothing is written.

    Args:
        words: as for ``ppocli train``.
        deep: where nothing is wrong, also load everything and take two samples through a training
            step, without an update (of a sweep: its first job).
        as_json: print one JSON object instead of text.

    Raises:
        PpocliError: what is wrong, all of it in one message.
        StoppedError: a signal ended the rehearsal.
    """
    found = examine(words, colour=not as_json and output.has_colours())
    for note in dict.fromkeys(found.notes):
        output.say(clean(note))
    for warning in dict.fromkeys(found.warnings):
        output.say(f"warning: {clean(warning)}")
    rehearsal: dict[str, Any] = {}
    if deep and not found.problems and found.config is not None:
        with found.taking(), output.working() as stop:
            from ppocli.tasks.rehearsal import rehearse

            rehearsal = rehearse(found.config, stop)
    problems = sorted(found.problems, key=lambda error: ORDER.index(error.exit_code)
                      if error.exit_code in ORDER else len(ORDER))
    if as_json:
        output.print_json({
            "valid": not problems, "exit_code": problems[0].exit_code if problems else 0,
            "problems": [{"exit_code": error.exit_code,
                          **{part: text and secrets.safe_text(text) for part, text in (
                              ("what", error.what), ("where", error.where), ("fix", error.fix))}}
                         for error in problems],
            "runs": list(map(asdict, found.plans)),
            **({"data": found.facts} if found.facts else {}),
            **({} if rehearsal else {"not_looked_at": found.not_looked_at}),
            **({"rehearsal": rehearsal} if rehearsal else {})})
        if problems:
            raise SystemExit(problems[0].exit_code)
        return
    if len(problems) == 1:
        raise problems[0]
    if problems:
        raise PpocliError("\n".join([f"{len(problems)} problems:", *(
            "  " + str(error).replace("\n", "\n  ") for error in problems)]),
            exit_code=problems[0].exit_code)
    if len(found.plans) == 1:
        put(f"valid: {found.plans[0]}")
    else:
        put("\n  ".join([f"valid: a sweep of {len(found.plans)} jobs", *map(str, found.plans)]))
    for line in [*found.facts, *(told(rehearsal) if rehearsal else ())]:
        put(line)
    if not rehearsal:
        output.say(f"not looked at: {', '.join(found.not_looked_at)} (ppocli validate --deep loads "
                   "everything and tries it)")


def told(found: dict[str, Any]) -> Iterator[str]:
    """What came of a rehearsal, in lines."""
    there = "".join(f", {found[name]} {name}" for name in ("examples", "prompts")
                    if found.get(name) is not None)
    yield (f"loaded: {found['parameters']:,} parameters, {found['trainable']:,} trained{there}, "
           f"on {found['device']} {found['precision']}")
    if "examples" in found:
        of = ""
        yield f"gradient of the first {found['rows']} ({found['tokens']} tokens): " + ", ".join(
            f"{'norm' if name == 'grad_norm' else f'{name} loss'} {figure(value, 4)}"
            for name, value in found["terms"].items())
    else:
        of = f" with {len(found['samples'])} samples"
        yield from _told_ppo(found)
    yield from (f"note: {note}" for note in found["notes"])
    yield "seconds: " + ", ".join(f"{name} {seconds:.1f}"
                                  for name, seconds in found["seconds"].items())
    yield f"peak memory: {found['peak_memory_mib']:.0f} MiB{of}"


def _told_ppo(found: dict[str, Any]) -> Iterator[str]:
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
