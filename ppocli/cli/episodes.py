"""``--env`` of ``ppocli generate`` and ``ppocli chat``: the policy, or a person, plays the run's
environment."""

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import chain
from typing import Any

import torch

from ppocli.cli.output import (
    awaiting_lines,
    complain,
    has_colours,
    prompt_heading,
    say,
    show_text,
    working,
)
from ppocli.cli.sampling_request import SamplingRequest
from ppocli.config.config_yaml import mapping_words, with_values
from ppocli.config.text import counted, figure, printable
from ppocli.distributed.backend import open_backend
from ppocli.distributed.standard_output import put
from ppocli.distributed.stop import StopFlag
from ppocli.environments.env_calls import Answered, Called, Calls
from ppocli.environments.wording import text_of
from ppocli.errors import ConfigError
from ppocli.launch.target_config import target_config
from ppocli.ppo.policy_evaluation import evaluate_chunks, row_of_run
from ppocli.ppo.session import EvalSession, build_eval_session
from ppocli.runs.episode import POLICY, transcript_turns
from ppocli.runs.target import find_target
from ppocli.sampling.conversation import Conversation
from ppocli.sampling.episode_sampler import EpisodeSampler
from ppocli.sampling.samples import Generation, TokenRows
from ppocli.training.task import PythonObjects


def generate(request: SamplingRequest, more: Sequence[str], prompts_file: str | None, *,
             as_json: bool) -> None:
    """Play an episode, or several, of each prompt, and print them as they end.

    Args:
        more: words in addition to those of ``request``.
        prompts_file: default: the prompts of the run's evaluation.
    """
    with working() as stop, _session(request, more, prompts_file) as session:
        for row in _played(session, stop):
            if as_json:
                put(json.dumps(row))
            else:
                _show_heading(row)
                _show(transcript_turns(row))
                _show_end(row)


def chat(request: SamplingRequest, *, watch: bool) -> None:
    """Play episodes of the run's evaluation prompts in a terminal, a person in the policy's place;
    or ``watch`` the policy.

    Raises:
        StoppedError: left by Ctrl-C.
    """
    with working() as stop, _session(request, ["ppo.chunk_size=1", *(
            [] if request.chat is None else [f"prompts.chat={request.chat}"])]) as session:
        sampler: Any = session.sampler
        calls = ShownCalls(sampler.calls, echo=watch)
        inner: Any = sampler.inner if watch else Person(session)
        plays = replace(session, sampler=EpisodeSampler(
            inner, calls, session.tokenizer, chat=bool(session.cfg.prompts.chat)))
        with awaiting_lines():
            for row in _played(plays, stop):
                _show(transcript_turns({**row, "opening": "", "turns": []}))  # how it was cut off
                _show_end(row)
                if watch:
                    input("(Enter: the next one, Ctrl-D: leave) ")


@contextmanager
def _session(request: SamplingRequest, more: Sequence[str], prompts_file: str | None = None
             ) -> Iterator[EvalSession]:
    """The session of the run's evaluation under the flags and words of a command.

    Raises:
        ConfigError: there is no environment, or an option is for single responses.
    """
    for option, value in (("--against", request.against), ("--system", request.system)):
        if value is not None:
            raise ConfigError(f"{option} is for single responses.", where=f"{option}, --env",
                              fix="leave it out")
    target = find_target(request.run, say=say, step=request.step, best=request.best)
    words = (*request.words, *more, *mapping_words({"generation": request.flags}))
    request = replace(request, words=words, prompts=prompts_file,
                      num_samples=request.num_samples or 1)
    request.check()
    cfg = target_config(target, request.overrides(target), needs_reward=True, needs_prompts=True,
                        trusts=request.trust, say=say)
    if cfg.env.fn is None:
        raise ConfigError(f"{target.name} has no environment.", where="--env",
                          fix="name one: env.fn=my_env.py:Class; or leave out --env")
    cfg = with_values(cfg, {"model.reference.kind": "none"})
    with open_backend(cfg.hardware, target.run_dir) as backend:
        yield build_eval_session(cfg, backend, PythonObjects(), policy=target.model)


def _played(session: EvalSession, stop: StopFlag) -> Iterator[dict[str, Any]]:
    with session.sampler.acting(session.policy) as policy:
        count = len(session.eval_prompts)
        for number, row in enumerate(chain.from_iterable(evaluate_chunks(
                session, session.context(stop), policy))):
            yield {"prompt_index": number % count, "sample": number // count,
                   **{name: value for name, value in row_of_run(row).items() if name != "kl"}}


class Person:
    """A sampler whose responses a person types."""

    repeatable, logprobs_match = False, True

    def __init__(self, session: EvalSession) -> None:
        self.acting = session.sampler.acting
        self._tokenizer, self._ends = session.tokenizer, sorted(session.eval_sampling.stop_ids)[:1]

    @contextmanager
    def converse(self, *_: Any, **__: Any) -> Iterator[Conversation]:
        """As of a sampler; the contexts are on the screen already."""
        yield self.speak

    def speak(self, rows: Sequence[int], contexts: TokenRows, limits: Sequence[int]) -> Generation:
        """As :data:`~ppocli.sampling.conversation.Conversation`, of one context.

        Raises:
            EOFError, KeyboardInterrupt: the person leaves.
        """
        limit, ids = limits[0], list[int]()
        while not 0 < len(ids) <= limit:
            if ids:
                complain(f"that is {counted(len(ids), 'token')}, and a turn has room for {limit}")
            typed = self._tokenizer(input("> "), add_special_tokens=False)["input_ids"]
            ids = [*typed, *self._ends[:limit - len(typed)]]
        tokens, zeros = torch.tensor([ids]), torch.zeros(1, len(ids))
        return Generation(tokens, torch.ones_like(tokens, dtype=torch.bool), zeros, zeros,
                          torch.tensor([ids[-1:] == self._ends]))


class ShownCalls(Calls):
    """Calls of an environment whose episodes are shown as they go.

    Args:
        echo: show the policy's turns, too.
    """

    def __init__(self, calls: Calls, *, echo: bool) -> None:
        super().__init__(calls.what, calls.cfg, calls.seed, calls.group_size)
        self._echo = echo

    def answers(self, calls: Sequence[Called], stream: int) -> list[Answered]:
        """As :meth:`Calls.answers`."""
        for call in calls:
            if call.turn == 0:
                _show_heading({**call.arguments, "prompt_index": call.episode})
            elif self._echo:
                _show([(POLICY, call.arguments["response"].strip())])
        answers = super().answers(calls, stream)
        for call, one in zip(calls, answers, strict=True):
            if one.result is not None:
                content = one.result.observation if call.turn else one.result
                text = (content if isinstance(content, str) else text_of(content or ())).strip()
                _show(transcript_turns({"turns": [{"observation": text, "reward": getattr(
                    one.result, "reward", 0.0)}]})[1:])
        return answers


def _show_heading(row: dict[str, Any]) -> None:
    show_text(prompt_heading(row["prompt_index"], row["prompt"], row.get("sample", 0)))


def _show(turns: Sequence[tuple[str, str]]) -> None:
    """Print (mark, text) of each turn, the mark before each line, the environment's lines dim."""
    colours = has_colours()
    for who, text in turns:
        for line in text.split("\n"):
            shown = printable(f"{who} {line}")
            put(f"\x1b[2m{shown}\x1b[0m" if colours and who != POLICY else shown)


def _show_end(row: dict[str, Any]) -> None:
    show_text(f"-- score {figure(row['score'], 3)}, {counted(len(row['turns']), 'turn')}\n")
