"""``ppocli generate`` and ``ppocli chat``, as the shell sees them."""

from __future__ import annotations

from typing import Annotated

import typer

from ppocli.cli.options import AsJson, Overrides, Run
from ppocli.cli.output import ending

Step = Annotated[int | None, typer.Option("--step", metavar="N", show_default=False,
                                          help="The checkpoint of this step of the run.")]
Best = Annotated[bool, typer.Option("--best", help="The run's best checkpoint by evaluation.")]
Score = Annotated[bool, typer.Option("--score", help="Score each response with the run's reward.")]
Reward = Annotated[str | None, typer.Option(
    "--reward", metavar="IMPORT", show_default=False,
    help="Score with another reward: module:function, file.py:function or a built-in; its "
         "arguments follow as words, reward.kwargs.NAME=VALUE.")]
Against = Annotated[str | None, typer.Option(
    "--against", metavar="RUN|base", show_default=False,
    help="Ask a second model the same; base is the one that the run started from.")]
Seed = Annotated[int, typer.Option("--seed", metavar="N", min=0,
                                   help="Equal seeds give equal responses.")]
System = Annotated[str | None, typer.Option("--system", metavar="TEXT", show_default=False,
                                            help="A system message before each conversation.")]
MaxNew = Annotated[int | None, typer.Option("--max-new-tokens", metavar="N", show_default=False,
                                            help="Longest response in tokens.")]
MinNew = Annotated[int | None, typer.Option("--min-new-tokens", metavar="N", show_default=False,
                                            help="No end before this many tokens.")]
Temperature = Annotated[float | None, typer.Option("--temperature", metavar="T",
                                                   show_default=False,
                                                   help="Softmax temperature.")]
TopK = Annotated[int | None, typer.Option("--top-k", metavar="K", show_default=False,
                                          help="Sample among the K likeliest tokens (0: all).")]
TopP = Annotated[float | None, typer.Option("--top-p", metavar="P", show_default=False,
                                            help="Nucleus sampling (1: all).")]
Greedy = Annotated[bool, typer.Option("--greedy", help="Always take the likeliest token.")]
Stop = Annotated[list[str] | None, typer.Option("--stop", metavar="TEXT", show_default=False,
                                                help="A text that ends a response; repeatable.")]


Prompt = Annotated[list[str] | None, typer.Option("--prompt", "-p", metavar="TEXT",
                                                  show_default=False,
                                                  help="A prompt; repeatable.")]
PromptsFile = Annotated[str | None, typer.Option(
    "--prompts-file", metavar="FILE", show_default=False,
    help="Prompts: txt (a line each), json, jsonl, csv or parquet; - is standard input.")]
Column = Annotated[str, typer.Option("--column", metavar="NAME",
                                     help="Column of the file that holds the prompt.")]
NumSamples = Annotated[int, typer.Option("--num-samples", "-n", metavar="K", min=1,
                                         help="Responses to each prompt.")]
AsChat = Annotated[bool | None, typer.Option(
    "--chat/--no-chat", show_default=False,
    help="Render prompts with the chat template, or take them as they are (default: as the run "
         "did).")]
BatchSize = Annotated[int, typer.Option("--batch-size", metavar="N", min=1,
                                        help="Samples decoded together.")]


def register(app: typer.Typer) -> None:
    """Add the commands."""
    app.command()(generate)
    app.command()(chat)


def generate(
        run: Run = None, overrides: Overrides = None, prompt: Prompt = None,
        prompts_file: PromptsFile = None, column: Column = "prompt", num_samples: NumSamples = 1,
        max_new_tokens: MaxNew = None, min_new_tokens: MinNew = None,
        temperature: Temperature = None, top_k: TopK = None, top_p: TopP = None,
        greedy: Greedy = False, stop: Stop = None, seed: Seed = 0, chat: AsChat = None,
        system: System = None, step: Step = None, best: Best = False, score: Score = False,
        reward: Reward = None, against: Against = None, batch_size: BatchSize = 64,
        as_json: AsJson = False) -> None:
    """Sample responses of a run, a checkpoint or a model.

    Prompts come from --prompt, --prompts-file or standard input. Sampling is the run's own unless
    options change it. Standard output holds the responses and nothing else.

    \b
    Examples:
      ppocli generate runs/NAME --prompt "The film was"
      ppocli generate runs/NAME --prompts-file prompts.jsonl -n 4 --score --json
      ppocli generate runs/NAME --prompt "The film was" --against base --score
      ppocli generate ./model --temperature 0.7 --max-new-tokens 60 < prompts.txt
      ppocli generate runs/NAME -p "Hello" --reward length reward.kwargs.target=20
    """
    from ppocli.cli.generate import Wanted, asking_of
    from ppocli.cli.generate import generate as answer

    flags = {"max_new_tokens": max_new_tokens, "min_new_tokens": min_new_tokens,
             "temperature": temperature, "top_k": top_k, "top_p": top_p,
             "do_sample": False if greedy else None, "stop_sequences": stop or None}
    ending(lambda: answer(
        asking_of(run, overrides, step=step, best=best, against=against, score=score,
                  reward=reward, seed=seed, system=system, flags=flags),
        Wanted(tuple(prompt or ()), prompts_file, column, num_samples, chat, batch_size, as_json)))


def chat(
        run: Run = None, overrides: Overrides = None,
        max_new_tokens: MaxNew = None, min_new_tokens: MinNew = None,
        temperature: Temperature = None, top_k: TopK = None, top_p: TopP = None,
        greedy: Greedy = False, stop: Stop = None, seed: Seed = 0, system: System = None,
        step: Step = None, best: Best = False, score: Score = False, reward: Reward = None,
        against: Against = None) -> None:
    """Talk to a run, a checkpoint or a model in the terminal.

    Answers appear as they are sampled. With a chat template the conversation is kept; without one
    each text is a prompt of its own. /help lists what can be typed; /quit or Ctrl-D leaves, Ctrl-C
    stops an answer.

    \b
    Examples:
      ppocli chat
      ppocli chat runs/NAME --score
      ppocli chat runs/NAME --against base --temperature 0.7
    """
    from ppocli.cli.chat import chat as talk
    from ppocli.cli.generate import asking_of

    flags = {"max_new_tokens": max_new_tokens, "min_new_tokens": min_new_tokens,
             "temperature": temperature, "top_k": top_k, "top_p": top_p,
             "do_sample": False if greedy else None, "stop_sequences": stop or None}
    ending(lambda: talk(asking_of(
        run, overrides, step=step, best=best, against=against, score=score, reward=reward,
        seed=seed, system=system, flags=flags)))
