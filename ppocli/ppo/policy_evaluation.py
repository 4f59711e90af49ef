"""Evaluation on fixed prompts with fixed random numbers, the same before and after training."""

from collections.abc import Iterator, Sequence
from itertools import chain
from typing import Any

from ppocli.data.prompt_set import PromptBatch
from ppocli.distributed.ranks import interleave
from ppocli.models.policy import Policy
from ppocli.ppo import step_metrics
from ppocli.ppo.reward_calls import judge
from ppocli.ppo.rollout import (
    Chunk,
    measure,
    response_texts,
    sample_policy,
)
from ppocli.ppo.session import EvalSession
from ppocli.runs.episode import DONE
from ppocli.sampling.samples import Samples
from ppocli.sampling.token_choice import EVALUATION
from ppocli.training.task import Evaluation, StepContext


def distinct(texts: list[str], n: int) -> float:
    """Different word n-grams over all word n-grams of the texts together; 0 without any."""
    grams = [tuple(words[i:i + n]) for words in (t.split() for t in texts)
             for i in range(len(words) - n + 1)]
    return len(set(grams)) / len(grams) if grams else 0.0


def evaluation_size(session: EvalSession) -> int:
    """How many samples a whole evaluation has."""
    return len(session.eval_prompts) * session.cfg.prompts.eval.repeat


def evaluate_chunks(session: EvalSession, context: StepContext, policy: Policy
                    ) -> Iterator[list[dict[str, Any]]]:
    """Sample and score the evaluation prompts, one generate call at a time: rows as `ppocli eval`
    has them in samples.jsonl, the i-th of which answers prompt ``i % len(eval_prompts)``.

    A sample is a function of seed, prompt and number alone.

    Args:
        policy: as the sampler's ``acting`` yields it.

    Raises:
        RewardError, DivergedError, StopRequested.
    """
    spec = session.eval_sampling
    # in fp32 the decoding pass has computed the policy's logprobs already
    decoded = session.from_decode and spec.temperature == 1.0
    for prompts, num_local in _shares(session, context):
        whole = Samples.joined(list(sample_policy(session, context, policy, prompts, spec,
                                                  EVALUATION)))
        columns = measure(session, context, policy, whole, phase="scoring of the evaluation",
                          want_policy=not decoded, want_values=False, estimator="k1",
                          temperature=1.0)
        batch, out = prompts.first(num_local), whole.first(num_local)
        chunk = Chunk(whole, batch, out, response_texts(session, batch, out, spec))
        scores, metrics = judge(session, context, chunk, "reward at evaluation")
        context.stop.meet()
        kl = [None] * num_local if session.reference is None else (
            columns["kl"].sum(1).tolist()[:num_local])
        shown = [score if valid else None
                 for score, valid in zip(scores.scores, scores.valid, strict=True)]
        rows = step_metrics.sample_rows(
            {"prompt": batch.texts, "response": chunk.responses, "score": shown, "kl": kl,
             "response_tokens": out.mask.sum(1).tolist(), "finished": out.finished.tolist()},
            {"rewards": scores.parts, "metrics": metrics}, scores.logs, out.episodes or ())
        yield interleave(session.backend.ranks.gather(rows))


def row_of_run(sample: dict[str, Any]) -> dict[str, Any]:
    """A row as runs have it in their samples.jsonl: without metrics, and without rewards where
    there is one alone."""
    return {name: value for name, value in sample.items()
            if name != "metrics" and (name != "rewards" or len(value) > 1)}


def _shares(session: EvalSession, context: StepContext) -> Iterator[tuple[PromptBatch, int]]:
    """This rank's prompts of each generate call, those after the first so many of which only keep
    the ranks in step."""
    ranks, prompts, total = session.backend.ranks, session.eval_prompts, evaluation_size(session)
    size = session.chunk_size * ranks.world
    for start in range(0, total, size):
        context.stop.meet()
        episodes, num_local = ranks.share(range(total)[start:start + size])
        yield prompts.batch([episode % len(prompts) for episode in episodes], episodes,
                            session.tokenizer.pad_token_id), num_local


def evaluate(session: EvalSession, context: StepContext) -> Evaluation:
    """Sample ``prompts.eval.repeat`` responses to each evaluation prompt and score them.

    ``kl_mean`` is the k1 estimate summed over each response and averaged over samples, in nats, of
    the distributions at temperature 1 without top-k or top-p, whatever the sampling was.

    Raises:
        RewardError, DivergedError, StopRequested.
    """
    with session.sampler.acting(session.policy) as policy:
        samples = list(chain.from_iterable(evaluate_chunks(session, context, policy)))
    return Evaluation(evaluation_figures(samples), list(map(row_of_run, samples)),
                      sum(s["response_tokens"] for s in samples))


def evaluation_figures(samples: Sequence[dict[str, Any]], grams: Sequence[int] = (2,)
                       ) -> dict[str, float]:
    """The figures of an evaluation from the rows of all its chunks, as summary.json and
    metrics.jsonl have them; ``grams`` are the lengths n of ``distinct_n``."""
    texts = [s["response"] for s in samples]
    score, std = step_metrics.mean_std([s["score"] for s in samples if s["score"] is not None])
    values = {
        "reward_mean": score, "reward_std": std,
        "kl_mean": step_metrics.mean([s["kl"] for s in samples if s["kl"] is not None]),
        "response_tokens_mean": step_metrics.mean([s["response_tokens"] for s in samples]),
        "finished_share": step_metrics.mean([float(s["finished"]) for s in samples]),
        **{f"distinct_{n}": distinct(texts, n) for n in grams}}
    values |= step_metrics.means_of(samples, "logged")
    if samples and "turns" in samples[0]:
        values["turns_mean"] = step_metrics.mean([float(len(s["turns"])) for s in samples])
        values["done_share"] = step_metrics.mean([float(s["ended"] == DONE) for s in samples])
    rewards = step_metrics.means_of(samples, "rewards", "reward")
    return values | (rewards if len(rewards) > 1 else {}) | step_metrics.means_of(samples,
                                                                                  "metrics")
