"""Sampling and decoding: distributions, stop rules, and that finished rows stop costing."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
import transformers
from helpers import make_lm, make_tokenizer, save_lm
from sessions import generate, rollout_of, session_of, small_config

from ppocli.ppo.policy_samples import evaluate
from ppocli.ppo.ppo_task import PPOTask
from ppocli.sampling import samples as sampling
from ppocli.sampling.decode_state import Decoder
from ppocli.sampling.sampler import decode
from ppocli.sampling.samples import (
    SamplingSpec,
    choose,
    decode_responses,
    inverse_transform,
    uniform,
)
from ppocli.sampling.transformers_generate import decode_by_transformers

NO_STOPS = torch.tensor([], dtype=torch.long)
FIRST = torch.zeros(1, dtype=torch.long)


@pytest.fixture
def lm():
    model = make_lm().eval()
    model.config.pad_token_id = None
    return model


def prompts_of(count, width=3):
    tokens = torch.arange(4, 4 + width)[None, :].repeat(count, 1)
    return tokens, torch.ones_like(tokens, dtype=torch.bool)


def sample(lm, count=8, **spec):
    given = {"max_new_tokens": 12, "stop_ids": (1,), **spec}
    given = SamplingSpec(**given)
    return generate(lm, *prompts_of(count), given, uniform(0, 1, range(count),
                                                           given.max_new_tokens),
                    tokenizer=make_tokenizer())


@pytest.mark.parametrize("vocabulary", [3, 256, 257])
def test_inverse_transform_draws_from_the_softmax(vocabulary):
    torch.manual_seed(1)
    logits = torch.randn(vocabulary) * 2
    draws = 20000
    u = torch.from_numpy(uniform(0, 1, range(draws), 1)[:, 0])
    tokens, total = inverse_transform(logits.expand(draws, -1), u)
    observed = torch.bincount(tokens, minlength=vocabulary).double()
    expected = torch.softmax(logits.double(), -1) * draws
    big = expected > 5
    statistic = ((observed - expected)[big].square() / expected[big]).sum()
    degrees = int(big.sum())
    assert statistic < degrees + 5 * (2 * degrees) ** 0.5
    # the exact inverse of the cumulative distribution, up to rounding at its corners
    exact = torch.searchsorted(torch.softmax(logits.double(), -1).cumsum(0), u)
    assert (exact == tokens).double().mean() > 0.999
    torch.testing.assert_close(total, torch.logsumexp(logits.double(), -1).float().expand(draws))


def test_impossible_tokens_are_never_drawn():
    logits = torch.full((1000, 600), float("-inf"))
    logits[:, [5, 300, 599]] = 0.0
    for edge in (1e-16, 0.5, 1 - 2**-53):
        drawn, _ = inverse_transform(logits, torch.full((1000,), edge, dtype=torch.float64))
        assert set(drawn.tolist()) <= {5, 300, 599}
    u = torch.from_numpy(uniform(0, 1, range(1000), 1)[:, 0])
    assert set(inverse_transform(logits, u)[0].tolist()) == {5, 300, 599}


@pytest.mark.parametrize(("vocabulary", "top_p"), [(9, 0.05), (256, 0.5), (257, 0.9),
                                                   (5000, 0.999999)])
def test_top_p_keeps_the_smallest_set_whose_probabilities_reach_it(vocabulary, top_p):
    torch.manual_seed(2)
    # steep rows, of which a few tokens make up nearly all, beside flat ones
    logits = torch.randn(6, vocabulary) * torch.tensor([0.0, 0.1, 1.0, 3.0, 9.0, 30.0])[:, None]
    logits[0] += torch.arange(vocabulary) * 1e-3
    kept = torch.isfinite(sampling._nucleus(logits, top_p))
    probabilities = torch.softmax(logits.double(), -1)
    for row, inside in zip(probabilities, kept, strict=True):
        assert row[inside].sum() >= top_p - 5e-6
        assert row[inside].sum() - row[inside].min() <= top_p + 5e-6
        assert not bool((~inside).any()) or row[inside].min() >= row[~inside].max()
    assert torch.equal(sampling._nucleus(logits, top_p)[kept], logits[kept])


@pytest.mark.parametrize("given", [
    {"min_p": 0.2}, {"min_p": 1.0}, {"top_p": 0.8, "min_p": 0.05}, {"repetition_penalty": 1.8},
    {"repetition_penalty": 0.5}, {"top_k": 20, "top_p": 0.9, "min_p": 0.1,
                                  "repetition_penalty": 1.3, "temperature": 0.6}])
def test_what_may_be_drawn_is_what_transformers_processors_leave(given):
    torch.manual_seed(4)
    logits, seen = torch.randn(6, 50) * 3, torch.randint(0, 50, (6, 9))
    processors = {"repetition_penalty": transformers.RepetitionPenaltyLogitsProcessor,
                  "temperature": transformers.TemperatureLogitsWarper,
                  "top_k": transformers.TopKLogitsWarper, "top_p": transformers.TopPLogitsWarper,
                  "min_p": transformers.MinPLogitsWarper}
    wanted = logits
    for name, processor in processors.items():
        if name in given:
            wanted = processor(given[name])(seen, wanted)
    spec = SamplingSpec(1, (), **given)
    mask = torch.zeros(6, 50, dtype=torch.bool).scatter_(1, seen, True)
    found = sampling._restrict(logits / spec.temperature, spec, FIRST.expand(6), NO_STOPS,
                               mask if "repetition_penalty" in given else None)
    torch.testing.assert_close(found, wanted)
    assert not spec.is_policy_distribution


@pytest.mark.parametrize("kind", ["gpt2", "t5"])
def test_a_repetition_penalty_gives_what_transformers_generate_gives(kind):
    """Row by row there, since padding counts as a token of the prompt there."""
    model = make_lm(kind, gain=3.0).eval()
    model.config.pad_token_id = None
    tokens, mask = prompts_of(4, 5)
    tokens = torch.where(mask, tokens * torch.arange(1, 5)[:, None] % 29 + 4, 0)
    mask = torch.arange(5) >= torch.tensor([[0], [2], [0], [3]])
    start = None if kind == "gpt2" else 0
    ours, free = (generate(model, tokens, mask, SamplingSpec(
        8, (1,), do_sample=False, repetition_penalty=penalty), uniform(0, 1, range(4), 8),
        tokenizer=None, start=start) for penalty in (2.5, 1.0))
    for i in range(4):
        prompt = tokens[i][mask[i]][None]
        theirs = model.generate(
            prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=8, do_sample=False,
            repetition_penalty=2.5, eos_token_id=1, pad_token_id=0, decoder_start_token_id=start)
        wanted = theirs[0, prompt.shape[1] if start is None else 1:]
        assert ours.tokens[i][ours.mask[i]].tolist() == wanted.tolist()
    assert not torch.equal(ours.tokens, free.tokens)


def test_an_ignored_eos_ends_nothing(tmp_path):
    cfg = small_config(tmp_path, generation__ignore_eos=True, generation__stop_token_ids=[9])
    with session_of(cfg) as session:
        assert session.sampling.stop_ids == session.eval_sampling.stop_ids == (9,)
        assert PPOTask(session).saved.generation_config.eos_token_id == 9
        assert session.sampling.is_policy_distribution
        rollout = rollout_of(session, count=64)
    ends = rollout.response_tokens.masked_fill(~rollout.response_mask, 0) == 1
    assert ends[:, :-1].any()  # and there is a response behind it
    assert not rollout.finished[ends.any(1) & (rollout.response_tokens != 9).all(1)].any()


def test_responses_end_with_any_stop_id_and_hold_nothing_after_it(lm):
    out = sample(lm, 32, stop_ids=(1, 9, 17))
    for i in range(32):
        length = int(out.mask[i].sum())
        assert out.mask[i, :length].all()
        tokens = out.tokens[i, :length].tolist()
        assert bool(out.finished[i]) == (tokens[-1] in (1, 9, 17))
        assert not set(tokens[:-1]) & {1, 9, 17}
        assert out.tokens[i, length:].sum() == 0
        assert out.logprobs[i, length:].abs().sum() == 0
    assert out.finished.any()


def test_an_end_may_be_chosen_once_that_many_tokens_are_there():
    """The end is all but certain; before it is allowed, the other token is taken."""
    logits, stops = torch.tensor([[0.0, 50.0]]).repeat(4, 1), torch.tensor([1])
    spec, half = SamplingSpec(9, (1,), min_new_tokens=3), torch.full((4,), 0.5)
    assert choose(logits, half, spec, torch.tensor([4, 2, 3, 0]), stops)[0].tolist() == [1, 0, 1, 0]


@pytest.mark.parametrize("by", ["decode", "transformers"])
@pytest.mark.parametrize(("least", "space"), [(0, " "), (4, " "), (4, "")])
def test_a_stop_counts_from_its_first_token_on_and_not_before_the_minimum(lm, by, least, space):
    """The tokenizer puts a space in front of each word but a text's first: behind a prompt a
    response's first word has it too. What is complete too soon neither ends nor is trimmed at."""
    tokenizer, noise = make_tokenizer(), uniform(0, 1, range(64), 12)
    tokens, mask = prompts_of(64)
    free = SamplingSpec(12, (1,))
    plain = generate(lm, tokens, mask, free, noise, tokenizer=tokenizer).ids
    stop = max(range(4, 20), key=[ids[0] for ids in plain].count)
    word = space + tokenizer.decode([stop])
    spec = SamplingSpec(12, (1,), min_new_tokens=least, stop_sequences=(word,))
    # a minimum of tokens also keeps the end-of-sequence token back
    plain = generate(lm, tokens, mask, replace(free, min_new_tokens=least), noise).ids
    decoder = Decoder(lm, spec, tokenizer)
    out = next(decode(decoder, tokens, mask, noise)) if by == "decode" else next(
        decode_by_transformers(decoder, tokens, mask, noise, limits=None, at_once=64, chunk=64,
                               cached=True))
    ends = [next((at + 1 for at, token in enumerate(ids) if token == stop and at + 1 >= least), 99)
            for ids in plain]
    assert out.ids == [ids[:end] for ids, end in zip(plain, ends, strict=True)]
    assert out.finished.tolist() == [end < 99 or ids[-1] == 1
                                     for ids, end in zip(plain, ends, strict=True)]
    texts = decode_responses(tokenizer, tokens.tolist(), out.ids, spec)
    kept = [ids[:end - 1] for ids, end in zip(plain, ends, strict=True)]
    assert [text.split() for text in texts] == [
        tokenizer.decode(ids, skip_special_tokens=True).split() for ids in kept]
    assert ends.count(1) > 5 or any(stop in ids[:least - 1] for ids in kept)


def set_generation_config(folder, **values):
    file = folder / "generation_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **values}))


def test_stop_ids_are_those_of_the_model_of_the_keys_and_of_special_tokens(tmp_path):
    folder = save_lm(tmp_path / "lm")
    make_tokenizer(bos=True).save_pretrained(folder)
    set_generation_config(folder, eos_token_id=[1, 9])
    cfg = small_config(tmp_path, generation__stop_token_ids=[17],
                       generation__stop_sequences=["<bos>", "good film"])
    with session_of(cfg) as session:
        assert sorted(session.sampling.stop_ids) == [1, 2, 9, 17]
        assert session.sampling.stop_sequences == ("good film",)


def test_drawn_lengths_are_even_and_belong_to_the_sample():
    drawn = sampling.lengths(7, range(4000), 2, 5)
    values, counts = np.unique(drawn, return_counts=True)
    assert values.tolist() == [2, 3, 4, 5]  # both ends are reached
    assert all(abs(count - 1000) < 110 for count in counts)  # four standard deviations
    assert sampling.lengths(7, [3999, 17], 2, 5).tolist() == [drawn[3999], drawn[17]]
    assert sampling.lengths(8, range(4000), 2, 5).tolist() != drawn.tolist()


def test_responses_keep_to_their_length(tmp_path):
    with session_of(small_config(tmp_path, generation__length_sampler=[3, 6])) as session:
        rollout = rollout_of(session)
        evaluated = evaluate(session, session.context())
    for tokens, most, finished in zip(rollout.response_mask.sum(1).tolist(),
                                      sampling.lengths(0, range(16), 3, 6).tolist(),
                                      rollout.finished.tolist(), strict=True):
        assert tokens == most or (finished and tokens < most)
    assert not rollout.finished.all()
    # at evaluation: max_new_tokens
    assert max(row["response_tokens"] for row in evaluated.samples) > 6
