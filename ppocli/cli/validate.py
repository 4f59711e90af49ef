"""``ppocli validate``: everything that is wrong with a run, told before it starts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ppocli.cli.options import AsJson, Overrides
from ppocli.cli.output import print_json, say, working
from ppocli.errors import PpocliError
from ppocli.text import clean, figure

if TYPE_CHECKING:
    from ppocli.cli.examine import Plan
    from ppocli.tasks.ppo.rehearsal import Rehearsal


def validate(overrides: Overrides = None,
             deep: Annotated[bool, typer.Option(
                 "--deep", help="Also load everything and rehearse a step with two samples.")
                 ] = False,
             as_json: AsJson = False) -> None:
    """Report everything that is wrong with a run, or with all jobs of a sweep, before it starts.

    Checks settings, models, prompts, rewards and the output folder, and reports every problem with
    its origin and its fix. Nothing is written. Exit code 0: valid; 2 settings, 3 model or data,
    7 reward, 6 disk, 5 run folder (for several kinds, the first in this order).

    \b
    Examples:
      ppocli validate +recipe=quickstart
      ppocli validate model.path=./lm prompts.path=prompts.jsonl reward.fn=my_rewards:score \\
          ppo.total_episodes=2000
      ppocli validate --deep +recipe=quickstart
      ppocli validate -m +recipe=quickstart seed=1,2
    """
    validate_words(overrides or [], deep=deep, as_json=as_json)


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
    from ppocli.cli.examine import examine

    found = examine(words)
    rehearsal = None
    if deep and not found.problems and found.config is not None:
        say(f"loading {found.config.model.path}")
        try:
            with working() as stop:
                from ppocli.tasks.ppo.rehearsal import rehearse

                rehearsal = rehearse(found.config, stop)
        except PpocliError as error:
            found.add([error])
    problems = sorted(found.problems, key=lambda error: ORDER.index(error.exit_code)
                      if error.exit_code in ORDER else len(ORDER))
    if as_json:
        print_json(_as_json(problems, found.plans, rehearsal))
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
        print(f"valid: {found.plans[0]}")
    else:
        print("\n  ".join([f"valid: a sweep of {len(found.plans)} jobs", *map(str, found.plans)]))
    if rehearsal is not None:
        print("\n".join(_told(rehearsal)))


def _as_json(problems: Sequence[PpocliError], plans: Sequence[Plan], rehearsal: Rehearsal | None
             ) -> dict[str, Any]:
    from ppocli.config.secrets import safe_text

    answer: dict[str, Any] = {
        "valid": not problems, "exit_code": problems[0].exit_code if problems else 0,
        "problems": [{"exit_code": error.exit_code,
                      **{part: text and safe_text(text) for part, text in (
                          ("what", error.what), ("where", error.where), ("fix", error.fix))}}
                     for error in problems],
        "runs": [asdict(plan) for plan in plans]}
    if rehearsal is not None:
        answer["rehearsal"] = {**asdict(rehearsal), "agrees": rehearsal.agrees}
    return answer


def _told(found: Rehearsal) -> Iterator[str]:
    yield (f"loaded: {found.parameters:,} parameters, {found.trainable:,} trained, "
           f"{found.prompts} prompts, on {found.device} {found.precision}")
    yield f"first prompt as the model gets it ({found.prompt_tokens} tokens):"
    yield f"  {clean(found.prompt)}"
    for number, sample in enumerate(found.samples, start=1):
        score = "none" if sample["score"] is None else f"{sample['score']:.4g}"
        ended = "ended" if sample["finished"] else "did not end"
        yield (f"sample {number}: score {score}, kl {figure(sample['kl'], 4)}, "
               f"{sample['response_tokens']} tokens, {ended}")
        yield f"  {clean(sample['prompt'])} → {clean(sample['response'])}"
    for kind, columns in (("reward", found.parts if len(found.parts) > 1 else {}),
                          ("metric", found.metrics)):
        for name, values in columns.items():
            yield f"{kind} {name}: " + ", ".join(
                "none" if value is None else f"{value:.4g}" for value in values)
    if found.kl_per_token is not None:
        verdict = "as it must be before training" if found.agrees else (
            "WRONG: before training it must be 0; do model.dtype and hardware.precision differ?")
        yield f"KL to the reference: {figure(found.kl_per_token, 6)} nats per token, {verdict}"
    if found.terms is None:
        yield "gradient: not tried, no sample has a score"
    else:
        yield (f"gradient: policy loss {figure(found.terms['policy'], 4)}, value loss "
               f"{figure(found.terms['value'], 4)}, norm {figure(found.terms['grad_norm'], 4)}")
    yield "seconds: " + ", ".join(f"{name} {seconds:.1f}"
                                  for name, seconds in found.seconds.items())
    yield f"peak memory: {found.peak_memory_mib:.0f} MiB with {len(found.samples)} samples"
