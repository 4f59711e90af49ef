"""Evaluation on fixed prompts with fixed random numbers, the same before and after training."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from ppocli.data.prompt_set import PromptBatch
from ppocli.episode import DONE
from ppocli.parallel.ranks import interleave
from ppocli.ppo.noise import EVALUATION
from ppocli.sampling.samples import Samples
from ppocli.tasks.ppo import figures
from ppocli.tasks.ppo.reward_calls import judge
from ppocli.tasks.ppo.rollout import measure, response_texts, sample_policy, sample_reference
from ppocli.tasks.ppo.session import EvalSession, sampling_sweep
from ppocli.training.task import Evaluation


def distinct(texts: list[str], n: int) -> float:
    """Different word n-grams over all word n-grams of the texts together; 0 without any."""
    grams = [tuple(words[i:i + n]) for words in (t.split() for t in texts)
             for i in range(len(words) - n + 1)]
    return len(set(grams)) / len(grams) if grams else 0.0


def evaluation_size(session: EvalSession) -> int:
    """How many samples a whole evaluation has."""
    return len(session.eval_prompts) * session.cfg.prompts.eval.repeat


def evaluate_chunks(session: EvalSession, *, skip: int = 0) -> Iterator[list[dict[str, Any]]]:
    """Sample and score the evaluation prompts, one generate call at a time: rows as `ppocli eval`
    has them in samples.jsonl, the i-th of which answers prompt ``i % len(eval_prompts)``.

    A sample is a function of seed, prompt and number alone, and chunks always begin at multiples of
    ``chunk_size`` times the number of ranks; so an evaluation that goes on after ``skip`` samples
    gives the very same ones.

    Args:
        skip: how many samples are there already; a multiple of ``session.chunk_size``, with
            one rank.

    Raises:
        RewardError, DivergedError, StopRequested.
    """
    for batch, own in _shares(session, skip):
        yield interleave(session.backend.ranks.gather(_one_share(session, batch, own)))


def row_of_run(sample: dict[str, Any]) -> dict[str, Any]:
    """A row as runs have it in their samples.jsonl: without metrics, and without rewards where
    there is one alone."""
    return {name: value for name, value in sample.items()
            if name != "metrics" and (name != "rewards" or len(value) > 1)}


def _shares(session: EvalSession, skip: int = 0) -> Iterator[tuple[PromptBatch, int]]:
    """This rank's prompts of each generate call, those after the first so many of which only keep
    the ranks in step."""
    ranks, prompts, total = session.backend.ranks, session.eval_prompts, evaluation_size(session)
    for start in range(skip, total, session.chunk_size * ranks.world):
        session.stop.meet()
        mine, own = ranks.share(range(total)[start:start + session.chunk_size * ranks.world])
        yield prompts.batch([episode % len(prompts) for episode in mine], mine,
                            session.tokenizer.pad_token_id), own


def _one_share(session: EvalSession, batch: PromptBatch, own: int) -> list[dict[str, Any]]:
    """This rank's samples, the first ``own`` of the batch's."""
    # in fp32 the decoding pass has computed the policy's logprobs already
    decoded = session.from_decode and session.eval_sampling.temperature == 1.0
    out = Samples.joined(list(sample_policy(session, batch, session.eval_sampling, EVALUATION)))
    measured = measure(session, out, phase="scoring of the evaluation", want_policy=not decoded,
                       want_values=False, estimator="k1", temperature=1.0)
    batch, out = batch.first(own), out.first(own)
    responses = response_texts(session, batch, out, session.eval_sampling)
    scores, metrics = judge(session, batch, out, responses, "reward at evaluation")
    session.stop.meet()
    kl = measured.kl.sum(1).tolist()[:own] if session.reference is not None else [None] * own
    shown = [score if valid else None
             for score, valid in zip(scores.scores, scores.valid, strict=True)]
    return figures.sample_rows(
        {"prompt": batch.texts, "response": responses, "score": shown, "kl": kl,
         "response_tokens": out.mask.sum(1).tolist(), "finished": out.finished.tolist()},
        {"rewards": scores.parts, "metrics": metrics}, scores.logs, out.episodes or ())


def evaluate(session: EvalSession) -> Evaluation:
    """Sample ``prompts.eval.repeat`` responses to each evaluation prompt and score them.

    ``kl_mean`` is the k1 estimate summed over each response and averaged over samples, in nats, of
    the distributions at temperature 1 without top-k or top-p, whatever the sampling was.

    Where a key of ``generation.eval`` is a list, this is done once for each of its values (trlX's
    sweep of a generation argument, ``trlx/trainer/accelerate_base_trainer.py::evaluate``).

    Raises:
        RewardError, DivergedError, StopRequested.
    """
    if not (specs := sampling_sweep(session.cfg.generation, session.eval_sampling)):
        return _evaluate_once(session)
    found = {name: _evaluate_once(replace(session, eval_sampling=spec))
             for name, spec in specs.items()}
    return replace(next(iter(found.values())), swept=found,
                   tokens=sum(one.tokens for one in found.values()))


def _evaluate_once(session: EvalSession) -> Evaluation:
    with session.acting() as acting:
        samples = [row for chunk in evaluate_chunks(acting) for row in chunk]
    return Evaluation(evaluation_figures(samples), [row_of_run(row) for row in samples],
                      sum(s["response_tokens"] for s in samples))


def reference_responses(session: EvalSession) -> list[str]:
    """The reference's response to each prompt of an evaluation, drawn with the random numbers of
    the policy's.

    Raises:
        StopRequested.
    """
    assert session.reference is not None  # else config/sampling.py has refused
    texts: list[str] = []
    with session.acting() as acting, session.reference.view(acting.policy.lm) as lm:
        for batch, own in _shares(session):
            out = sample_reference(session, lm, batch, session.eval_sampling, EVALUATION)
            texts += interleave(session.backend.ranks.gather(
                response_texts(session, batch, out, session.eval_sampling)[:own]))
    return texts


def evaluation_figures(samples: Sequence[dict[str, Any]], grams: Sequence[int] = (2,)
                       ) -> dict[str, float]:
    """The figures of an evaluation from the rows of all its chunks, as summary.json and
    metrics.jsonl have them; ``grams`` are the lengths n of ``distinct_n``."""
    texts = [s["response"] for s in samples]
    score, std = figures.mean_std([s["score"] for s in samples if s["score"] is not None])
    found = {
        "reward_mean": score, "reward_std": std,
        "kl_mean": figures.mean([s["kl"] for s in samples if s["kl"] is not None]),
        "response_tokens_mean": figures.mean([s["response_tokens"] for s in samples]),
        "finished_share": figures.mean([float(s["finished"]) for s in samples]),
        **{f"distinct_{n}": distinct(texts, n) for n in grams}}
    found |= figures.means_of(samples, "logged")
    if samples and "turns" in samples[0]:
        found["turns_mean"] = figures.mean([float(len(s["turns"])) for s in samples])
        found["done_share"] = figures.mean([float(s["ended"] == DONE) for s in samples])
    rewards = figures.means_of(samples, "rewards", "reward")
    return found | (rewards if len(rewards) > 1 else {}) | figures.means_of(samples, "metrics")
