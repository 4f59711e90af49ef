"""``ppocli serve-reward``, as the shell sees it."""

from __future__ import annotations

from typing import Annotated

import typer

from ppocli.cli.options import WORDS, HydraCommand, Overrides
from ppocli.cli.output import ending


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("serve-reward", cls=HydraCommand, context_settings=WORDS)(serve_reward)


def serve_reward(overrides: Overrides = None,
                 host: Annotated[str, typer.Option(
                     help="The address to listen at; 0.0.0.0 lets other machines in.")
                     ] = "127.0.0.1",
                 port: Annotated[int, typer.Option(
                     min=0, max=65535, help="The port; 0 takes one that is free.")] = 8123,
                 token_env: Annotated[str | None, typer.Option(
                     "--token-env", metavar="NAME", show_default=False,
                     help="Ask for the token in this environment variable.")] = None,
                 tokenizer: Annotated[str | None, typer.Option(
                     metavar="FOLDER", show_default=False,
                     help="The policy's tokenizer, for rewards that ask for it.")] = None,
                 max_body_mib: Annotated[int, typer.Option(
                     "--max-body-mib", min=1, help="Size of the largest request, in MiB.")] = 64
                 ) -> None:
    """Serve a reward function or reward model to trainings on this or other machines.

    The words are those of train; what they say of the reward is served, everything else is left
    aside. The address is printed, and the words that make a training ask there. Ctrl-C or SIGTERM
    ends it once requests under way are answered.

    \b
    Examples:
      ppocli serve-reward reward.fn=my_rewards:score
      ppocli serve-reward reward=reward_model reward.kwargs.model=./rm \\
          reward.kwargs.device=cuda:1 --port 8200
      ppocli serve-reward +recipe=quickstart --host 0.0.0.0 --token-env REWARD_KEY
      ppocli train +recipe=quickstart ~reward reward.fn=http \\
          reward.kwargs.url=http://127.0.0.1:8123/score
    """
    from ppocli.cli.serve import serve_reward as serve

    ending(lambda: serve(overrides or [], host=host, port=port, token_env=token_env,
                         tokenizer=tokenizer, max_body_mib=max_body_mib))
