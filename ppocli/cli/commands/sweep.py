"""``ppocli sweep``, as the shell sees it."""

from __future__ import annotations

from typing import Annotated

import typer

from ppocli.cli.options import WORDS, AsJson, Overrides
from ppocli.cli.output import ending

sweep_app = typer.Typer(no_args_is_help=True, rich_markup_mode=None,
                        help="Look at a sweep (ppocli train -m), and go on with one.")


def register(app: typer.Typer) -> None:
    """Add the commands."""
    app.add_typer(sweep_app, name="sweep")


@sweep_app.command("show")
def sweep_show(sweep: Annotated[str | None, typer.Argument(
                   metavar="[SWEEP]", show_default=False,
                   help="A sweep's folder or name (default: the newest below runs/).")] = None,
               sort: Annotated[str, typer.Option(
                   metavar="ORDER", help="reward (best first), kl (lowest first) or job.")
                   ] = "reward",
               as_json: AsJson = False) -> None:
    """Print the jobs of a sweep: status, reward and KL after training, and what was swept.

    For sweeps over several keys, the mean figures of every value follow.

    \b
    Examples:
      ppocli sweep show
      ppocli sweep show runs/sweep-20260131-120000 --sort kl
      ppocli sweep show --json
    """
    from ppocli.cli.sweep_show import show_sweep

    ending(lambda: show_sweep(sweep, sort, as_json))


@sweep_app.command("resume", context_settings=WORDS)
def sweep_resume(sweep: Annotated[str, typer.Argument(
                     metavar="SWEEP", help="The sweep's folder or name.")],
                 overrides: Overrides = None) -> None:
    """Run the jobs of a sweep that are not finished, in the same folders.

    A job goes on from its newest checkpoint, or starts if it has none. Finished jobs are kept.
    Words are settings for the jobs that are run, e.g. reward.timeout=60. Only grids can be gone
    on with: other sweepers choose their jobs as they go.

    \b
    Examples:
      ppocli sweep resume runs/sweep-20260131-120000
      ppocli sweep resume runs/sweep-20260131-120000 ppo.micro_batch_size=4
    """
    from ppocli.cli.output import ignore_broken_pipes
    from ppocli.cli.sweep import resume_sweep

    def resume() -> None:
        ignore_broken_pipes()
        resume_sweep(sweep, overrides or [])

    ending(resume)
