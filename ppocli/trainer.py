"""A training loop of one's own: ``ppocli.PPOTrainer`` generates, learns, logs and saves when asked.

The configuration, the run folder and every computation are those of ``ppocli train``; only who
calls them when, and where scores come from, is up to the loop.
"""

import weakref
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from ppocli.errors import ConfigError, DivergedError, RewardError

if TYPE_CHECKING:
    from ppocli.api import TrainedRun
    from ppocli.tasks.ppo.rollout import Chunk


@dataclass(frozen=True)
class Batch:
    """B samples of the policy, for ``PPOTrainer.step``."""

    prompts: list[str]
    """as a reward sees them"""
    responses: list[str]
    """without special tokens, trimmed at a stop sequence"""
    prompt_ids: list[list[int]]
    response_ids: list[list[int]]
    """through the token that ended the response"""
    logprobs: list[list[float]]
    """of each response token under the policy"""
    values: list[list[float]]
    """of the state before each response token; zeros where the decoding pass computes none"""
    finished: list[bool]
    """whether a stop token or stop sequence ended the response"""
    columns: dict[str, list[Any]]
    """what came with the prompts beside their text"""
    chunks: "tuple[Chunk, ...]"
    """the same as tensors, for ``step``"""
    made_at: int
    """steps that the policy had made"""

    def __len__(self) -> int:
        return len(self.responses)


class PPOTrainer:
    """PPO, step by step, in one process.

    Args:
        overrides: words of the command line, such as ``["model.path=gpt2", "ppo.num_steps=100"]``
            or ``["resume=runs/NAME"]``. ``reward.fn`` is not needed and not used.
        prompts: what ``generate()`` draws from where the words name no ``prompts.path``.

    Raises:
        ConfigError: what is wrong with the words; several processes.
        PpocliError: something can't be loaded or written, as in ``ppocli train``.
    """

    def __init__(self, overrides: Sequence[str] = (), *, prompts: Sequence[Any] | None = None
                 ) -> None:
        from ppocli.launching.launch import LoopScores, checked_words, opened
        from ppocli.tasks.ppo.task import PPOTask
        from ppocli.training.task import PythonObjects

        self._scores = LoopScores()
        objects = PythonObjects(reward_fn=self._scores,
                                prompts=None if prompts is None else list(prompts))
        with ExitStack() as stack:
            self._run = stack.enter_context(opened(checked_words(overrides, objects), objects))
            assert isinstance(self._run.task, PPOTask)
            self._task, self._session = self._run.task, self._run.task.session
            self._stack = stack.pop_all()
        # whoever forgets to close it holds the folder until the end of Python at most
        self._closing = weakref.finalize(self, self._stack.close)
        self._drawn = self._run.state.episodes
        self._logged = self._run.state.step
        self._ended = False

    @property
    def run_dir(self) -> Path:
        """The run's folder."""
        return self._run.folder.path

    @property
    def tokenizer(self) -> Any:
        """The policy's tokenizer."""
        return self._session.tokenizer

    @property
    def model(self) -> Any:
        """The policy as a transformers model, without its value function."""
        return self._session.policy.lm

    @property
    def steps(self) -> int:
        """Steps made so far, those before a resume included."""
        return self._run.state.step

    @property
    def done(self) -> bool:
        """Whether all samples that ``ppo.total_episodes`` or ``ppo.num_steps`` plan are drawn."""
        return self._left() == 0

    @property
    def kl_coef(self) -> float:
        """The KL coefficient that the next step is charged with."""
        return float(self._task.summary(self._run.state)["kl_coef"])

    def _left(self) -> int:
        return max(self._task.total_samples() - self._run.state.episodes, 0)

    def _check_open(self) -> None:
        if not self._closing.alive:
            raise ConfigError("This trainer is closed.", fix="make another one, with "
                              f'"resume={self.run_dir}" where it is to go on')
        if not self._run.intact:
            raise DivergedError("The last step did not end: the weights are between two steps.",
                                fix="go on from a checkpoint: ppocli.PPOTrainer(["
                                f'"resume={self.run_dir}"])')
        self._run.display.listen()

    def generate(self, prompts: Sequence[Any] | None = None) -> Batch:
        """One sampled response to each prompt, as ``generation`` says.

        Args:
            prompts: texts, mappings with a ``prompt`` and columns, or lists or tensors of token
                ids (without padding), which are taken as they are; None: the next
                ``ppo.num_rollouts`` of the prompts that the configuration names, in the order of
                ``ppocli train``.

        Raises:
            ConfigError: unusable prompts.
            DivergedError: the policy's probabilities are no longer finite.
        """
        from ppocli.sampling.samples import Samples
        from ppocli.tasks.ppo.own_samples import prompts_of
        from ppocli.tasks.ppo.rollout import generate_chunks

        self._check_open()
        session, clock = self._session, self._run.clock
        clock.mark("between")
        if prompts is None:
            count = min(session.cfg.ppo.num_rollouts, self._left() or session.cfg.ppo.num_rollouts)
            batch = session.next_prompts(self._drawn, count)
        else:
            batch = prompts_of(session, prompts, self._drawn)
        chunks = list(generate_chunks(session, batch, len(batch), self._run.stop))
        self._drawn += len(batch)
        clock.mark("rollout")

        def rows(values: Any, mask: Any) -> list[list[Any]]:
            return [row[kept].tolist() for row, kept in zip(values, mask, strict=True)]

        out = Samples.joined([one.out for one in chunks])
        return Batch(
            batch.texts, [text for one in chunks for text in one.responses],
            rows(batch.tokens, batch.mask), out.action_ids, rows(out.logprobs, out.mask),
            rows(out.values, out.mask), out.finished.tolist(), batch.columns, tuple(chunks),
            self.steps)

    def step(self, queries: Batch | Sequence[Any], responses: Any = None, scores: Any = None
             ) -> dict[str, Any]:
        """One PPO step: ``step(batch, scores)`` with what ``generate`` returned, or ``step(queries,
        responses, scores)`` with texts or token ids from anywhere.

        Responses from elsewhere get their logprobs and values by a forward pass of the policy; ids
        are taken as they are, texts tokenised (and ended by EOS).

        Args:
            scores: one number a sample, or one list of numbers a sample, one for each token of its
                response.

        Returns:
            the step's figures by the names of ``metrics.jsonl``, for ``log``.

        Raises:
            ConfigError: counts, ids or lengths that don't fit; more samples than are planned.
            RewardError: scores of another number or kind, or not finite.
            DivergedError: the policy stopped being finite.
        """
        from ppocli.tasks.ppo.own_samples import given, prompts_of, scored
        from ppocli.training.loop import commit, learn

        self._check_open()
        session, state, clock = self._session, self._run.state, self._run.clock
        if isinstance(queries, Batch):
            if (responses is None) == (scores is None):
                raise ConfigError("A batch has its responses: only scores go with it.",
                                  where="PPOTrainer.step", fix="step(batch, scores)")
            if queries.made_at != state.step:
                raise ConfigError(f"The batch is of the policy after step {queries.made_at}, which "
                                  f"has made {state.step} by now.", where="PPOTrainer.step",
                                  fix="generate again, or step(batch.prompt_ids, "
                                  "batch.response_ids, scores)")
            scores = responses if scores is None else scores
            chunks: Sequence[Chunk] = queries.chunks
        else:
            chunks = given(session, prompts_of(session, queries, state.episodes),
                           [] if responses is None else responses)
        self._check_size(chunks)
        clock.mark("between")
        self._scores.given = _plain_scores(scores)
        try:
            rollout = scored(session, chunks, state.episodes, self._run.stop, clock,
                             forward=not isinstance(queries, Batch))
        except RewardError as error:
            error.where = "PPOTrainer.step(scores)"
            raise
        finally:
            self._scores.given = None
        learn(self._run, rollout)
        figures = self._run.state.pending or {}
        commit(self._run, replace(self._run.state, pending=None))  # the row is the caller's
        self._drawn = max(self._drawn, self._run.state.episodes)
        return dict(figures)

    def _check_size(self, chunks: "Sequence[Chunk]") -> None:
        count, left, n = sum(map(len, chunks)), self._left(), self._session.cfg.ppo.n
        if count > left:
            raise ConfigError(f"{count} samples, but only {left} of the "
                              f"{self._task.total_samples()} that are planned are left: "
                              "schedules end there.", where="ppo.num_steps, ppo.total_episodes",
                              fix="plan for more of them")
        texts = [text for one in chunks for text in one.prompts.texts]
        groups = [set(texts[i:i + n]) for i in range(0, count, n)]
        if n > 1 and (count % n or any(len(group) > 1 for group in groups)):
            raise ConfigError(f"ppo.n={n} compares {n} responses to the same prompt, which have to "
                              "stand one after another.", where="ppo.n",
                              fix=f"give each prompt {n} times in a row")

    def log(self, figures: Mapping[str, Any]) -> None:
        """Write figures, those of ``step`` and any of your own, to ``metrics.jsonl`` and the
        trackers.

        Args:
            figures: numbers by name; ``step`` among them, and not logged yet.

        Raises:
            ConfigError: no ``step``, one that is logged already, or what is no number.
        """
        self._check_open()
        row = {name: value.item() if hasattr(value, "item") else value
               for name, value in figures.items()}
        wrong = [name for name, value in row.items()
                 if not (value is None or isinstance(value, (int, float)))]
        if wrong:
            raise ConfigError(f"{wrong[0]}={row[wrong[0]]!r} is no number.", where="PPOTrainer.log",
                              fix="log numbers alone")
        step = row.get("step")
        if not isinstance(step, int) or step <= self._logged:
            raise ConfigError(f"step={step!r} must be a step that isn't logged yet (the last one "
                              f"is {self._logged}).", where="PPOTrainer.log",
                              fix="log once after each step: log({**stats, **yours})")
        self._run.recorder.row(row)
        self._logged = step

    def save_checkpoint(self) -> Path:
        """Save everything that ``resume=RUN`` needs; returns the checkpoint's folder.

        Raises:
            DiskError: the disk is full or refuses; older checkpoints are untouched.
        """
        from ppocli.training.loop import save

        self._check_open()
        self._run.clock.mark("between")
        save(self._run)
        self._run.clock.mark("saving")
        return self._run.folder.checkpoints / f"step-{self.steps:06d}"

    def save_pretrained(self, folder: str | Path) -> Path:
        """Write the policy as a plain Hugging Face folder, which must not exist or be empty.

        Raises:
            ConfigError: the folder holds something.
            DiskError: the disk is full or refuses.
        """
        from ppocli.storage.atomic import publish_folder

        self._check_open()
        target = Path(folder)
        if target.exists() and (not target.is_dir() or any(target.iterdir())):
            raise ConfigError(f"{target} exists already and isn't empty; nothing is overwritten.",
                              fix="name another folder")
        publish_folder(self._task.saved.write, target)
        return target

    def finish(self) -> "TrainedRun":
        """End the run as ``ppocli train`` does: a checkpoint, ``model/`` and the summary.

        Raises:
            DiskError: the disk is full or refuses.
        """
        from ppocli.api import load_run
        from ppocli.launching.ending import publish

        self.save_checkpoint()
        result = publish(self._run)
        self._ended = True
        self.close()
        return load_run(result.run_dir)

    def close(self) -> None:
        """Close the run's files and trackers and release its folder. What was not saved is lost."""
        self._summarise("stopped")
        self._closing()

    def _summarise(self, status: str, error: str | None = None) -> None:
        from ppocli.launching.ending import write_summary_of

        if self._closing.alive and not self._ended:
            write_summary_of(self._run, status, error)
            self._ended = True

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 trace: TracebackType | None) -> None:
        if error is None or isinstance(error, KeyboardInterrupt):
            self.close()
            return
        self._summarise("failed", f"{type(error).__name__}: {error}")
        if self._closing.detach() is not None:
            self._stack.__exit__(kind, error, trace)  # the trackers hear that it failed


def _plain_scores(scores: Any) -> Any:
    """Scores, tensors of a single number as numbers: TRL's loops collect them like that."""
    if not isinstance(scores, (list, tuple)):
        return scores
    return [one.reshape(()) if getattr(one, "shape", None) == (1,) else one for one in scores]
