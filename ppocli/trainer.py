"""A training loop of one's own: ``ppocli.PPOTrainer`` generates, learns, logs and saves when asked.

The configuration, the run folder and every computation are those of ``ppocli train``; only who
calls them when, and where scores come from, is up to the loop.
"""

import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from ppocli.distributed.torch_settings import default_modes
from ppocli.errors import ConfigError, DivergedError, RewardError

if TYPE_CHECKING:
    from ppocli.api import TrainedRun
    from ppocli.ppo.rollout import Chunk
    from ppocli.ppo.session import Session
    from ppocli.training.task import StepContext


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
    temperature: float
    """that the responses were sampled with"""

    def __len__(self) -> int:
        return len(self.responses)

    def __getitem__(self, index: Any) -> Any:
        raise ConfigError("This is a batch, no list of responses.", where="PPOTrainer.generate",
                          fix="batch.responses or batch.response_ids; or, for tensors as TRL's, "
                          "generate(queries, return_prompt=False)")


class PPOTrainer:
    """PPO, step by step; in one process, or in those that torchrun or ``accelerate launch`` has
    started, which make every call together.

    Args:
        overrides: words of the command line, such as ``["model.path=gpt2", "ppo.num_steps=100"]``
            or ``["resume=runs/NAME"]``; or a nested mapping of settings. ``reward.fn`` is not
            needed and not used.
        model: in place of ``model.path``: a transformers model, which is trained itself. As it is
            now, it is written into the run's folder, where the reference comes from.
        ref_model: in place of ``model.reference.path``.
        tokenizer: in place of ``model.tokenizer_path``.
        prompts: what ``generate()`` draws from where the words name no ``prompts.path``.

    Raises:
        ConfigError: what is wrong with the words or the objects.
        PpocliError: something can't be loaded or written, as in ``ppocli train``.
    """

    @default_modes()
    def __init__(self, overrides: Sequence[str] | Mapping[str, Any] = (), model: Any = None,
                 ref_model: Any = None, tokenizer: Any = None, *,
                 prompts: Sequence[Any] | None = None) -> None:
        from ppocli.data.sources import as_list
        from ppocli.launch.loop_run import LoopScores, open_loop_run
        from ppocli.ppo.ppo_task import PPOTask
        from ppocli.training.task import PythonObjects

        self._scores = LoopScores()
        objects = PythonObjects(reward_fn=self._scores, model=model, ref_model=ref_model,
                                tokenizer=tokenizer,
                                prompts=as_list(prompts, "prompts", "prompts"))
        with ExitStack() as stack:
            self._run = stack.enter_context(open_loop_run(overrides, objects))
            assert isinstance(self._run.task, PPOTask)
            self._task = self._run.task
            self._stack = stack.pop_all()
        # whoever forgets to close it holds the folder until the end of Python at most
        self._closing = weakref.finalize(self, self._stack.close)
        self._num_sampled = self._run.state.episodes
        self._logged = self._run.state.step
        self._ended = False

    @property
    def _session(self) -> "Session":
        return self._task.session

    @property
    def _context(self) -> "StepContext":
        return self._session.context(self._run.stop, self._run.clock)

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
        """Whether all samples that ``ppo.total_episodes``, ``ppo.epochs`` or ``ppo.num_steps`` plan
        are drawn."""
        return self._left() == 0

    @property
    def kl_coef(self) -> float:
        """The KL coefficient that the next step is charged with."""
        return float(self._task.summary(self._run.state)["kl_coef"])

    def _left(self) -> int:
        return max(self._task.length.total_samples - self._run.state.episodes, 0)

    def _check_open(self) -> None:
        if not self._closing.alive:
            raise ConfigError("This trainer is closed.", fix="make another one, with "
                              f'"resume={self.run_dir}" where it is to go on')
        if not self._run.intact:
            raise DivergedError("The last step did not end: the weights are between two steps.",
                                fix="go on from a checkpoint: ppocli.PPOTrainer(["
                                f'"resume={self.run_dir}"])')
        self._run.display.listen()

    @default_modes()
    def generate(self, prompts: Any = None, length_sampler: Callable[[], int] | None = None,
                 batch_size: int | None = None, return_prompt: bool | None = None,
                 *, attention_mask: Any = None, **sampling: Any) -> Any:
        """One sampled response to each prompt, as ``generation`` says. Several processes call it
        together, each with prompts of its own.

        Args:
            prompts: texts, mappings with a ``prompt`` and columns, or lists or tensors of token
                ids without padding; one tensor [L] or [B, L]; None: the next ``ppo.num_rollouts``
                of the configured prompts, in the order of ``ppocli train``.
            length_sampler: asked once for the ``max_new_tokens`` of this call.
            batch_size: prompts at a time, in place of ``ppo.chunk_size``.
            return_prompt: return tensors, with or without the prompt in front; by default only
                a tensor as ``prompts`` gives tensors, with it.
            attention_mask: of a [B, L] tensor, 0 where it is padded.
            **sampling: for this call alone: max_new_tokens, min_new_tokens, temperature, top_k,
                top_p, do_sample, stop_sequences, eos_token_id.

        Returns:
            a :class:`Batch`; or tensors of token ids.
        """
        from ppocli.data.data_set import rows_of
        from ppocli.evaluation.player import called
        from ppocli.ppo import caller_samples
        from ppocli.ppo.policy_samples import generate_chunks, share_of_prompts
        from ppocli.sampling.samples import Samples

        self._check_open()
        session, ranks = self._session, self._session.backend.ranks
        self._run.clock.mark("between")
        if length_sampler is not None:
            sampling["max_new_tokens"] = int(length_sampler())
        generation, spec = ranks.all_do(lambda: caller_samples.sampling_of_call(
            session, *called(session.cfg, sampling), batch_size), "generate")
        cfg = replace(session.cfg, generation=generation)
        if prompts is None:
            count = min(session.cfg.ppo.num_rollouts, self._left() or session.cfg.ppo.num_rollouts)
            batch, num_local = share_of_prompts(session, self._num_sampled, count)
        else:
            batch = ranks.all_do(lambda: caller_samples.prompts_of(session, caller_samples.rows_of(
                session, prompts, attention_mask, where="prompts"), cfg), "generate")
            num_local = len(batch)
            batch, count = caller_samples.pad_to_equal_share(session, batch, self._num_sampled)
        with session.sampler.acting(session.policy) as policy:
            chunks = list(generate_chunks(session, self._context, policy, spec, batch, num_local,
                                          size=batch_size or 0))
        self._num_sampled += count
        self._run.clock.mark("rollout")

        def plain(values: Any, mask: Any) -> list[list[Any]]:
            return [row[kept].tolist() for row, kept in zip(values, mask, strict=True)]

        out = Samples.joined([one.samples for one in chunks])
        local = rows_of(batch, slice(num_local))
        prompt_ids = plain(local.tokens, local.mask)
        if return_prompt is not None or getattr(prompts, "ndim", None) is not None:
            return caller_samples.as_tensors(session, prompts, prompt_ids, out.action_ids,
                                             with_prompt=return_prompt is not False)
        return Batch(local.texts, [text for one in chunks for text in one.responses], prompt_ids,
                     out.action_ids, plain(out.logprobs, out.mask), plain(out.values, out.mask),
                     out.finished.tolist(), local.columns, tuple(chunks), self.steps,
                     spec.temperature)

    @default_modes()
    def step(self, queries: Any, responses: Any = None, scores: Any = None,
             response_masks: Sequence[Any] | None = None) -> dict[str, Any]:
        """One PPO step: ``step(batch, scores)`` with what ``generate`` returned, or ``step(queries,
        responses, scores)`` with texts or token ids from anywhere. Returns the step's figures by
        the names of ``metrics.jsonl``, for ``log``.

        Responses from elsewhere, and those sampled with another temperature, get their logprobs and
        values by a forward pass of the policy; texts are tokenised and ended by EOS. Several
        processes call it together, each with samples of its own.

        Args:
            queries, responses: lists of texts, or of lists or tensors [L] or [1, L] of token ids;
                or one tensor [L] or [B, L].
            scores: one number a sample, or a list with one for each token of its response.
            response_masks: for each token of each response whether it counts in the step.

        Raises:
            ConfigError: counts, ids or lengths that don't fit; more samples than are planned.
            RewardError: scores of another number or kind, or not finite.
        """
        from ppocli.ppo import caller_samples
        from ppocli.training.loop import learn, settle

        self._check_open()
        session, state, forward = self._session, self._run.state, True
        chunks: Sequence[Chunk]
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
            chunks, forward = queries.chunks, queries.temperature != session.sampling.temperature
        else:
            chunks = caller_samples.chunks_of(session, self._context, queries, responses,
                                           state.episodes)
        if response_masks is not None:
            chunks, scores = session.backend.ranks.all_do(
                lambda: caller_samples.masked(chunks, response_masks, scores), "step")
        self._check_size(chunks)
        self._run.clock.mark("between")
        self._scores.scores = _plain_scores(scores)
        try:
            rollout = caller_samples.scored(session, self._context, chunks, state.episodes,
                                         forward=forward, gaps=response_masks is not None)
        except RewardError as error:
            error.where = "PPOTrainer.step(scores)"
            raise
        finally:
            self._scores.scores = None
        learn(self._run, rollout)
        figures = self._run.state.pending or {}
        settle(self._run)  # the row is the caller's
        self._num_sampled = max(self._num_sampled, self._run.state.episodes)
        return dict(figures)

    def _check_size(self, chunks: "Sequence[Chunk]") -> None:
        ranks, left, n = self._session.backend.ranks, self._left(), self._session.cfg.ppo.n
        samples = sorted(pair for part in ranks.gather([pair for one in chunks for pair in zip(
            one.prompts.episodes, one.prompts.texts, strict=True)]) for pair in part)
        count = len(samples)
        if count > left:
            raise ConfigError(f"{count} samples, but only {left} of the "
                              f"{self._task.length.total_samples} that are planned are left: "
                              "schedules end there.", where="ppo.num_steps, ppo.total_episodes",
                              fix="plan for more of them")
        groups = [{text for _, text in samples[i:i + n]} for i in range(0, count, n)]
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
        if wrong := [name for name, value in row.items()
                     if not (value is None or isinstance(value, (int, float)))]:
            raise ConfigError(f"{wrong[0]}={row[wrong[0]]!r} is no number.", where="PPOTrainer.log",
                              fix="log numbers alone")
        step = row.get("step")
        if not isinstance(step, int) or step <= self._logged:
            raise ConfigError(f"step={step!r} must be a step that isn't logged yet (the last one "
                              f"is {self._logged}).", where="PPOTrainer.log",
                              fix="log once after each step: log({**stats, **yours})")
        if self._session.backend.ranks.first:
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
        from ppocli.api import free_folder
        from ppocli.runs.atomic import publish_folder

        self._check_open()
        # a loop may call this on the first process alone: the others do nothing here
        if self._session.backend.ranks.first:
            publish_folder(self._task.saved.write, free_folder(folder))
        return Path(folder)

    def finish(self) -> "TrainedRun":
        """End the run as ``ppocli train`` does: a checkpoint, ``model/`` and the summary.

        Raises:
            DiskError: the disk is full or refuses.
        """
        from ppocli.api import load_run
        from ppocli.launch.exit_handling import publish

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
        from ppocli.launch.exit_handling import write_summary_of

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
