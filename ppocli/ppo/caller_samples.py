"""Samples of a loop that someone else owns: their prompts, their responses, their scores.

What ``ppocli train`` does in one go (:mod:`ppocli.ppo.step`) in the parts that such a loop
calls, chunk by chunk in the same sizes, so that the same samples give the same numbers.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from ppocli.config.schema import GenerationConfig, TrainConfig
from ppocli.data import data_set
from ppocli.data.data_set import PromptBatch, PromptSet
from ppocli.data.prompt_set import load_prompts
from ppocli.distributed.deepspeed_internals import whole_shape
from ppocli.errors import ConfigError
from ppocli.models import layout
from ppocli.models.head import vocabulary_of
from ppocli.models.loading.model_config import max_positions
from ppocli.models.trunk import has_encoder
from ppocli.ppo.policy_samples import generate_chunks
from ppocli.ppo.rollout import Chunk, Rollout, measure_chunk, of_all_ranks, rollout_of
from ppocli.ppo.session import Session, max_prompt_tokens
from ppocli.rewards.reward_records import RewardRequest
from ppocli.sampling.samples import Generation, Samples, SamplingSpec, single_turn
from ppocli.training.build_models import sampling_specs
from ppocli.training.task import StepContext


def rows_of(session: Session, items: Any, attention_mask: Any = None, *, where: str) -> list[Any]:
    """A caller's argument for several samples as a list of one item each.

    Args:
        items: a list of them, of which each may be a tensor [1, L]; one tensor [L], or [B, L]; or a
            tokenizer's answer, with ``input_ids`` and an ``attention_mask``.
        attention_mask: 0 where a row of ``items`` is padded.

    Raises:
        ConfigError: one text; a mask of another shape; rows that seem to be padded, without one.
    """
    if isinstance(items, str):
        raise ConfigError(f"{where} is one text, not a list of them.", where=where,
                          fix=f"[{items!r}]")
    if isinstance(items, Mapping) and "input_ids" in items:
        items, attention_mask = items["input_ids"], items.get("attention_mask", attention_mask)
    if getattr(items, "ndim", None) == 1:
        items, attention_mask = [items], None if attention_mask is None else [attention_mask]
    rows = [row[0] if getattr(row, "ndim", None) == 2 and len(row) == 1 else row for row in items]
    if attention_mask is not None:
        masks = list(attention_mask)
        if list(map(len, masks)) != list(map(len, rows)):
            raise ConfigError("attention_mask has another shape than the ids.", where=where,
                              fix="give one number for each id, 0 where it pads")
        return [[i for i, kept in zip(_plain(row), _plain(mask), strict=True) if kept]
                for row, mask in zip(rows, masks, strict=True)]
    pad = session.tokenizer.pad_token_id
    if getattr(items, "ndim", None) == 2 and len(rows) > 1 and any(
            pad in _plain(row)[:1] + _plain(row)[-1:] for row in rows):
        raise ConfigError(f"Rows of the tensor begin or end with {pad}, which pads, and nothing "
                          "says whether it does here.", where=where,
                          fix="give a list of rows without padding, or the attention_mask too")
    return rows


def _plain(values: Any) -> Any:
    """A tensor or an array as a list, or as a number."""
    return values.tolist() if hasattr(values, "tolist") else values


def prompts_of(session: Session, items: list[Any], cfg: TrainConfig) -> PromptBatch:
    """Prompts as a batch, in their order: texts (or mappings with a ``prompt`` and columns) are
    rendered and tokenised as those of ``prompts.items``, token ids are taken as they are.

    Args:
        items: B texts, mappings, or lists or tensors of token ids.
        cfg: whose ``generation`` decides how long a response can be.

    Raises:
        ConfigError: no prompts, ids that the model doesn't have or that leave no room for a
            response, or texts and ids mixed.
        InputError: a prompt is blank.
    """
    if not items:
        raise ConfigError("There are no prompts.", where="prompts", fix="give at least one")
    longest = max_prompt_tokens(cfg, session.policy.lm)
    if all(isinstance(item, (str, dict)) for item in items):
        prompts = load_prompts(replace(cfg.prompts, limit=None), session.tokenizer, seed=cfg.seed,
                               max_prompt_tokens=longest, items=items,
                               whole=has_encoder(session.policy.lm))
        if len(prompts) != len(items):
            raise ConfigError(f"{len(items) - len(prompts)} of the {len(items)} prompts are blank, "
                              "have no token or are overlong.", where="prompts",
                              fix="leave them out")
    else:
        ids = [token_ids(session, item, f"prompts[{i}]") for i, item in enumerate(items)]
        for i, row in enumerate(ids):
            if len(row) > longest:
                raise ConfigError(f"A prompt of {len(row)} tokens leaves no room for a response: "
                                  f"the model takes {longest}.", where=f"prompts[{i}]",
                                  fix="cut it, or lower generation.max_new_tokens")
        texts = session.tokenizer.batch_decode(ids, skip_special_tokens=True)
        prompts = PromptSet(ids, texts, {}, ())
    count = len(items)
    return prompts.batch(range(count), range(count), session.tokenizer.pad_token_id)


def pad_to_equal_share(session: Session, prompts: PromptBatch, first: int
                       ) -> tuple[PromptBatch, int]:
    """This rank's own prompts with the numbers of their samples, which go on from those of the
    rank before; the last one is repeated until all ranks have as many.

    Args:
        first: the number of rank 0's first sample.

    Returns:
        the prompts, and how many samples all ranks have together.
    """
    ranks, count = session.backend.ranks, len(prompts)
    counts = ranks.gather(count)
    start = first + sum(counts[:ranks.rank])
    rows = [min(i, count - 1) for i in range(max(counts))]
    return replace(prompts.rows(rows), episodes=[start + i for i in rows]), sum(counts)


def token_ids(session: Session, value: Any, where: str, *, sampled: bool = False) -> list[int]:
    """Token ids as a list of numbers that the model has.

    Args:
        sampled: whether they are the policy's own choice, so that each needs a token.

    Raises:
        ConfigError: no list, array or tensor of them, or an empty one.
    """
    # a single id may be squeezed
    values = [_plain(value)] if getattr(value, "ndim", None) == 0 else _plain(value)
    size = whole_shape(session.policy.lm.get_input_embeddings().weight)[0]
    absent = set[int]()
    if sampled:
        vocabulary = vocabulary_of(session.policy.lm)
        size, absent = vocabulary.size, set(vocabulary.gaps)
    if isinstance(values, str) or not isinstance(values, Iterable):
        raise ConfigError(f"{str(value)[:60]!r} is no list of token ids.", where=where,
                          fix="give texts alone, or token ids alone")
    ids = list(values)
    wrong = next((i for i in ids if isinstance(i, bool) or not isinstance(i, int)
                  or not 0 <= i < size or i in absent), None)
    if wrong is not None or not ids:
        what = "It has no token" if not ids else f"{wrong!r} is no token id of this model"
        raise ConfigError(f"{what}.", where=where, fix="ids are whole numbers from 0 to "
                          f"{size - 1}, without padding")
    return ids


def chunks_of(session: Session, context: StepContext, queries: Any, responses: Any, first: int
              ) -> list[Chunk]:
    """Responses that come from elsewhere, for :func:`scored` with ``forward``.

    Token ids are taken as they are and count as finished where their last one ends a response. A
    text is tokenised by itself, without the tokens that start a text, and given the EOS token. All
    ranks call it in step.

    Args:
        queries, responses: B each, as :func:`rows_of` takes them.
        first: number of the first sample within the run.

    Raises:
        ConfigError: another number of them, ids that the model doesn't have, or too many.
    """
    def read() -> tuple[PromptBatch, list[list[int]]]:
        prompts = prompts_of(session, rows_of(session, queries, where="queries"), session.cfg)
        items = [] if responses is None else rows_of(session, responses, where="responses")
        if len(items) != len(prompts):
            raise ConfigError(f"There are {len(prompts)} queries, but {len(items)} as responses.",
                              where="responses", fix="give one response to each query")
        return prompts, _responses_as_ids(session, prompts, items)

    prompts, rows = session.backend.ranks.all_do(read, "step")
    count = len(rows)
    prompts, _ = pad_to_equal_share(session, prompts, first)
    rows += rows[-1:] * (len(prompts) - count)
    return list(generate_chunks(session, context, session.policy, session.sampling, prompts,
                                count, _samples(session, prompts, rows)))


def _responses_as_ids(session: Session, prompts: PromptBatch, responses: list[Any]
                      ) -> list[list[int]]:
    limit, end = max_positions(session.policy.lm), session.tokenizer.eos_token_id
    # an encoder has positions of its own
    lengths, rows = prompts.mask.sum(1) * (not has_encoder(session.policy.lm)), list[list[int]]()
    for i, (response, length) in enumerate(zip(responses, lengths.tolist(), strict=True)):
        ids = response
        if isinstance(response, str):
            ids = list(session.tokenizer(response, add_special_tokens=False)["input_ids"])
            ids += [end] * (end is not None)
        row = token_ids(session, ids, f"responses[{i}]", sampled=True)
        if limit is not None and len(row) + length > limit:
            raise ConfigError(f"A query of {length} tokens and a response of {len(row)} are more "
                              f"than the {limit} that the model takes.", where=f"responses[{i}]",
                              fix="cut one of them")
        rows.append(row)
    return rows


def _samples(session: Session, prompts: PromptBatch, rows: list[list[int]]) -> Samples:
    """Responses behind their prompts; their logprobs and values are still to be computed."""
    mask = layout.padded([[True] * len(row) for row in rows], torch.bool)
    out = Generation(layout.padded(rows), mask, torch.zeros(mask.shape), torch.zeros(mask.shape),
                     torch.tensor([row[-1] in session.sampling.stop_ids for row in rows]))
    return single_turn(prompts.tokens, prompts.mask, out, session.loaded.decoder_start)


def scored(session: Session, context: StepContext, chunks: Sequence[Chunk], first: int, *,
           forward: bool, gaps: bool) -> Rollout:
    """The chunks with their scores, logprobs, values and KL as one rollout.

    The session's reward is called once, for all samples.

    Args:
        first: the number that the first sample counts as.
        forward: compute logprobs and values by a forward pass, whatever ``ppo.logprobs_from`` says.
        gaps: tokens between actions are steps of reward and value 0.

    Raises:
        RewardError: the scores are wrong in number, kind or value.
    """
    ranks = session.backend.ranks
    request = RewardRequest(prompts=[text for one in chunks for text in one.prompts.texts],
                            responses=[text for one in chunks for text in one.responses],
                            response_ids=[ids for one in chunks for ids in one.samples.action_ids],
                            columns={}, tokenizer=session.tokenizer)
    # there may be fewer samples than ranks
    scores: Any = ranks.all_do(
        lambda: session.reward.score(request) if request.prompts else None, "scores")
    context.clock.mark("reward")
    parts, start = [], 0
    for chunk in chunks:
        measured = measure_chunk(session, context, session.policy, chunk,
                                 forward=forward or not session.from_decode)
        rows = slice(start, start + len(chunk.responses))
        if chunk.responses:
            parts.append(rollout_of(session, chunk, data_set.rows_of(scores, rows), measured))
        start = rows.stop
    whole = of_all_ranks(session, parts, context.clock)
    if ranks.any(gaps):
        places = whole.sequences.actions
        after = torch.nn.functional.pad(places[:, 1:] - places[:, :-1] - 1, (0, 1))
        whole = replace(whole, extras=replace(whole.extras, gaps=after.clamp(min=0)))
    context.clock.mark("scoring")
    return replace(whole, prompts=replace(
        whole.prompts, episodes=list(range(first, first + len(whole)))))


def masked(chunks: Sequence[Chunk], masks: Sequence[Any], scores: Any) -> tuple[list[Chunk], Any]:
    """The samples with only those of their response tokens as actions that a mask keeps: the
    others are read, and have neither logprob, value, KL nor reward. The score lands on the last
    token that is kept; of a list of scores those of the tokens that are kept count.

    Args:
        masks: for each sample one truth value a response token (TRL's ``response_masks``).

    Raises:
        ConfigError: masks of another number or length, or without a true value.
    """
    plain, parts, start = list(map(_plain, masks)), list[Chunk](), 0
    count = sum(len(chunk.responses) for chunk in chunks)
    if len(plain) != count:
        raise ConfigError(f"There are {len(plain)} response_masks for {count} samples.",
                          where="response_masks", fix="give one to each response")
    for chunk in chunks:
        kept, size = chunk.out.mask.clone(), len(chunk.responses)
        for row, mask in enumerate(plain[start:start + size]):
            length = int(kept[row].sum())
            if len(mask) != length or not any(mask):
                what = f"has {len(mask)} values" if any(mask) else "keeps no token"
                raise ConfigError(f"A mask {what}; its response has {length} tokens.",
                                  where=f"response_masks[{start + row}]",
                                  fix="give one value for each token, not 0 where it trains")
            kept[row, :length] = torch.tensor(mask).bool()
        out = chunk.out.only(kept)
        parts.append(replace(chunk, out=out, samples=out.rows(slice(size))))
        start += size
    if isinstance(scores, (list, tuple)) and len(scores) == count:
        scores = [[value for value, kept in zip(_plain(score), mask, strict=True) if kept]
                  if isinstance(score, (list, tuple)) and len(score) == len(mask) else score
                  for score, mask in zip(scores, plain, strict=True)]
    return parts, scores


def sampling_of_call(session: Session, generation: GenerationConfig, ends: Sequence[int] | None,
                     chunk: int | None) -> tuple[GenerationConfig, SamplingSpec]:
    """The settings of one call of ``generate``, and how it samples.

    Args:
        generation: in place of the configuration's.
        ends: ids that end a response, in place of those that do.
        chunk: most prompts at a time.

    Raises:
        ConfigError: none at a time.
    """
    if chunk is not None and chunk < 1:
        raise ConfigError(f"batch_size is {chunk}.", where="batch_size", fix="give 1 or more")
    spec, _ = sampling_specs(generation, session.tokenizer, session.loaded)
    return generation, spec if ends is None else replace(spec, stop_ids=tuple(ends))


def as_tensors(session: Session, queries: Any, prompts: Sequence[list[int]],
               responses: Sequence[list[int]], *, with_prompt: bool) -> Any:
    """Responses as TRL's ``generate`` gave them, on the device of the queries.

    Returns:
        int64: for one tensor of queries [L] or [B, L] one [B, L + R], padded behind; for a
        list of them a list of [L + R], without padding. Without ``with_prompt``, and for an
        encoder-decoder, the response's R alone.
    """
    whole = with_prompt and not has_encoder(session.policy.lm)
    if isinstance(queries, Mapping):
        queries = queries["input_ids"]
    one = getattr(queries, "ndim", None) is not None
    if one:  # with their padding, behind which callers look for the response
        prompts = _plain(queries.reshape(-1, queries.shape[-1]))
    device = getattr(queries if one else next(iter(queries or ()), None), "device", None)
    rows = [torch.tensor([*(prompt if whole else []), *response], device=device)
            for prompt, response in zip(prompts, responses, strict=True)]
    return torch.nn.utils.rnn.pad_sequence(
        rows, batch_first=True, padding_value=session.tokenizer.pad_token_id) if one else rows
