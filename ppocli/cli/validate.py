"""``ppocli validate``, and ``--dry-run`` of the commands that train."""

from collections.abc import Sequence
from dataclasses import asdict

from ppocli.cli import output
from ppocli.cli.run_checks import Checked, check_words
from ppocli.config import secrets
from ppocli.config.text import clean
from ppocli.distributed.standard_output import put
from ppocli.errors import PpocliError

ORDER = (2, 3, 7, 6, 5)
"""exit codes, the one that decides first; others come last"""


def validate_words(words: Sequence[str], *, as_json: bool = False) -> None:
    """Check everything about a run or a sweep that can be checked without weights; nothing is
    written.

    Args:
        words: as for ``ppocli train``.
        as_json: print one JSON object instead of text.

    Raises:
        PpocliError: what is wrong, all of it in one message.
    """
    checked = _checked(words, colour=not as_json and output.has_colours())
    if not as_json:
        _raise_all(checked.problems)
        _print_plans(checked)
        output.say(f"not looked at: {', '.join(checked.not_looked_at)} (--dry-run of the command "
                   "that trains loads everything and tries a step)")
        return
    exit_code = checked.problems[0].exit_code if checked.problems else 0
    output.print_json({
        "valid": not checked.problems, "exit_code": exit_code,
        "problems": [{"exit_code": error.exit_code, "code": error.code,
                      **{part: text and secrets.safe_text(text) for part, text in (
                          ("what", error.what), ("where", error.where), ("fix", error.fix))}}
                     for error in checked.problems],
        "runs": list(map(asdict, checked.plans)),
        **({"data": checked.facts} if checked.facts else {}),
        "not_looked_at": checked.not_looked_at})
    if exit_code:
        raise SystemExit(exit_code)


def dry_run(words: Sequence[str]) -> None:
    """Check a run as :func:`validate_words` does, then load everything and make a small first step
    (of a sweep: of its first job). Nothing is kept.

    Raises:
        PpocliError: whatever would end the run at its first step.
        StoppedError: stopped by a signal.
    """
    checked = _checked(words, colour=output.has_colours())
    _raise_all(checked.problems)
    assert checked.config is not None
    with output.working() as stop:
        from ppocli.launch.preflight import try_first_step

        lines = try_first_step(checked.config, stop)
    _print_plans(checked)
    for line in lines:
        put(line)


def _checked(words: Sequence[str], *, colour: bool) -> Checked:
    """Check the words, and print notes and warnings; the first problem decides the exit code."""
    checked = check_words(words, colour=colour)
    for note in dict.fromkeys(checked.notes):
        output.say(clean(note))
    for warning in dict.fromkeys(checked.warnings):
        output.say(f"warning: {clean(warning)}")
    checked.problems.sort(key=lambda error: ORDER.index(error.exit_code)
                          if error.exit_code in ORDER else len(ORDER))
    return checked


def _raise_all(problems: Sequence[PpocliError]) -> None:
    if len(problems) == 1:
        raise problems[0]
    if problems:
        raise PpocliError("\n".join([f"{len(problems)} problems:", *(
            "  " + str(error).replace("\n", "\n  ") for error in problems)]),
            exit_code=problems[0].exit_code)


def _print_plans(checked: Checked) -> None:
    plans = checked.plans
    put(f"valid: {plans[0]}" if len(plans) == 1 else
        "\n  ".join([f"valid: a sweep of {len(plans)} jobs", *map(str, plans)]))
    for line in checked.facts:
        put(line)
