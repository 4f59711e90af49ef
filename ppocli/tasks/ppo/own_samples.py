"""Samples of a loop that someone else owns: their prompts, their responses, their scores.

What ``ppocli train`` does in one go (:mod:`ppocli.tasks.ppo.rollout`) in the parts that such a loop
calls, chunk by chunk in the same sizes, so that the same samples give the same numbers.
"""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch

from ppocli.data.prompt_set import PromptBatch, PromptSet, load_prompts
from ppocli.errors import ConfigError
from ppocli.models.loading.model_config import max_positions
from ppocli.models.trunk import has_encoder
from ppocli.parallel.stop import StopFlag
from ppocli.rewards.records import RewardRequest
from ppocli.sampling.samples import Generation, Samples, single_turn
from ppocli.tasks.ppo.records import Rollout
from ppocli.tasks.ppo.reward_calls import some_scores
from ppocli.tasks.ppo.rollout import Chunk, chunk_of, measure_chunk, rollout_of
from ppocli.tasks.ppo.session import Session, max_prompt_tokens
from ppocli.training.clock import PhaseClock


def prompts_of(session: Session, prompts: Sequence[Any], start: int) -> PromptBatch:
    """Prompts as a batch, in their order: texts (or mappings with a ``prompt`` and columns) are
    rendered and tokenised as those of ``prompts.items``, token ids are taken as they are.

    Args:
        prompts: B texts, mappings, or lists or tensors of token ids.
        start: number of the first sample within the run.

    Raises:
        ConfigError: no prompts, ids that the model doesn't have or that leave no room for a
            response, or texts and ids mixed.
        InputError: a prompt is blank.
    """
    if isinstance(prompts, str):
        raise ConfigError("prompts is one text, not a list of them.", where="prompts",
                          fix=f"[{prompts!r}]")
    items = list(prompts)
    if not items:
        raise ConfigError("There are no prompts.", where="prompts", fix="give at least one")
    longest = max_prompt_tokens(session.cfg, session.policy.lm)
    if all(isinstance(item, (str, dict)) for item in items):
        found = load_prompts(replace(session.cfg.prompts, limit=None), session.tokenizer,
                             seed=session.cfg.seed, max_prompt_tokens=longest, items=items,
                             whole=has_encoder(session.policy.lm))
        if len(found) != len(items):
            raise ConfigError(f"{len(items) - len(found)} of the {len(items)} prompts are blank, "
                              "have no token or are overlong.", where="prompts",
                              fix="leave them out")
    else:
        ids = [token_ids(session, item, f"prompts[{i}]") for i, item in enumerate(items)]
        for i, row in enumerate(ids):
            if len(row) > longest:
                raise ConfigError(f"A prompt of {len(row)} tokens leaves no room for a response: "
                                  f"the model takes {longest}.", where=f"prompts[{i}]",
                                  fix="cut it, or lower generation.max_new_tokens")
        found = PromptSet(ids, session.tokenizer.batch_decode(ids, skip_special_tokens=True), {},
                          [])
    count = len(items)
    return found.batch(range(count), range(start, start + count), session.tokenizer.pad_token_id)


def token_ids(session: Session, given: Any, where: str) -> list[int]:
    """Token ids as a list of numbers that the model knows.

    Raises:
        ConfigError: no list, array or tensor of them, or an empty one.
    """
    values = given.tolist() if hasattr(given, "tolist") else given
    size = session.policy.lm.get_input_embeddings().num_embeddings
    if isinstance(values, str) or not isinstance(values, Iterable):
        raise ConfigError(f"{str(given)[:60]!r} is no list of token ids.", where=where,
                          fix="give texts alone, or token ids alone")
    ids = list(values)
    wrong = next((i for i in ids if isinstance(i, bool) or not isinstance(i, int)
                  or not 0 <= i < size), None)
    if wrong is not None or not ids:
        what = "It has no token" if not ids else f"{wrong!r} is no token id of this model"
        raise ConfigError(f"{what}.", where=where, fix="ids are whole numbers from 0 to "
                          f"{size - 1}, without padding")
    return ids


def given(session: Session, prompts: PromptBatch, responses: Sequence[Any]) -> list[Chunk]:
    """Responses that come from elsewhere, for :func:`scored` with ``forward``.

    Token ids are taken as they are and count as finished where their last one ends a response. A
    text is tokenised by itself, without the tokens that start a text, and given the EOS token.

    Args:
        responses: B texts, or lists or tensors of token ids, without padding.

    Raises:
        ConfigError: another number of them, ids that the model doesn't have, or too many.
    """
    if isinstance(responses, str) or len(responses) != len(prompts):
        raise ConfigError(f"There are {len(prompts)} queries, but "
                          f"{'one text' if isinstance(responses, str) else len(responses)} as "
                          "responses.", where="responses", fix="give one response to each query")
    rows = [_response_ids(session, response, i) for i, response in enumerate(responses)]
    limit = max_positions(session.policy.lm)
    # an encoder has positions of its own
    lengths = prompts.mask.sum(1) * (not has_encoder(session.policy.lm))
    for i, (row, length) in enumerate(zip(rows, lengths.tolist(), strict=True)):
        if limit is not None and len(row) + length > limit:
            raise ConfigError(f"A query of {length} tokens and a response of {len(row)} are more "
                              f"than the {limit} that the model takes.", where=f"responses[{i}]",
                              fix="cut one of them")
    chunks = []
    for start in range(0, len(prompts), session.chunk_size):
        some = range(len(prompts))[start:start + session.chunk_size]
        part = prompts.rows(some)
        chunks.append(chunk_of(session, part, _samples(session, part, rows[start:some.stop]),
                               len(part)))
    return chunks


def _response_ids(session: Session, response: Any, index: int) -> list[int]:
    where = f"responses[{index}]"
    if not isinstance(response, str):
        return token_ids(session, response, where)
    ids = list(session.tokenizer(response, add_special_tokens=False)["input_ids"])
    end = session.tokenizer.eos_token_id
    return token_ids(session, ids + [end] * (end is not None), where)


def _samples(session: Session, prompts: PromptBatch, rows: list[list[int]]) -> Samples:
    """Responses behind their prompts; their logprobs and values are still to be computed."""
    width = max(len(row) for row in rows)
    tokens = torch.tensor([row + [0] * (width - len(row)) for row in rows], dtype=torch.int64)
    lengths = torch.tensor([len(row) for row in rows])
    mask = torch.arange(width)[None, :] < lengths[:, None]
    ends = torch.tensor([row[-1] in session.sampling.stop_ids for row in rows])
    out = Generation(tokens, mask, torch.zeros(mask.shape), torch.zeros(mask.shape), ends)
    return single_turn(prompts.tokens, prompts.mask, out, session.loaded.decoder_start)


def scored(session: Session, chunks: Sequence[Chunk], first: int, stop: StopFlag,
           clock: PhaseClock, *, forward: bool) -> Rollout:
    """The chunks with their scores, logprobs, values and KL as one rollout.

    The session's reward is asked once, for all samples.

    Args:
        first: the number that the first sample counts as.
        forward: compute logprobs and values by a forward pass, whatever ``ppo.logprobs_from`` says.

    Raises:
        RewardError: the scores are wrong in number, kind or value.
    """
    request = RewardRequest(
        prompts=[text for one in chunks for text in one.prompts.texts],
        responses=[text for one in chunks for text in one.responses],
        response_ids=[ids for one in chunks for ids in one.out.action_ids],
        columns={}, tokenizer=session.tokenizer)
    scores = session.reward.score(request)
    clock.mark("reward")
    parts, start = [], 0
    for chunk in chunks:
        measured = measure_chunk(session, chunk, stop, forward=forward or not session.from_decode)
        some = slice(start, start + len(chunk))
        parts.append(rollout_of(session, chunk, some_scores(scores, some), measured))
        start = some.stop
    whole = Rollout.joined(parts)
    clock.mark("scoring")
    return replace(whole, prompts=replace(
        whole.prompts, episodes=list(range(first, first + len(whole)))))
