"""Prompts take the places of responses that have ended: the same samples, in fewer passes."""

import pytest
import torch
from helpers import make_tokenizer, model_config, save_lm
from sessions import assert_same_responses, generate, rolled, small_config
from transformers import AutoModelForCausalLM

from ppocli.models.policy import build_value_head
from ppocli.models.transformers_internals import caches_all_keys
from ppocli.sampling.samples import SamplingSpec, uniform

COUNT, NEW = 23, 20
SPEC = SamplingSpec(NEW, (1, 5, 9, 14, 20, 27, 33))


def model_of(kind, **keys):
    torch.manual_seed(0)
    lm = AutoModelForCausalLM.from_config(model_config(kind, **keys)).eval()
    lm.config.pad_token_id = None
    return lm


def prompts_of(lengths):
    width = max(lengths)
    mask = torch.arange(width)[None] >= width - torch.tensor(lengths)[:, None]
    tokens = torch.randint(4, 30, mask.shape, generator=torch.Generator().manual_seed(1))
    return tokens * mask, mask


RAGGED = [1 + (7 * i) % 9 for i in range(COUNT)]


def drawn(lm, at_once, spec=SPEC, lengths=RAGGED, **more):
    """Responses, and the rows of each pass that they took."""
    noted = []
    hook = lm.base_model.register_forward_pre_hook(
        lambda _module, _args, given: noted.append(len(given["input_ids"])), with_kwargs=True)
    try:
        out = generate(lm, *prompts_of(lengths), spec, uniform(
            3, 1, range(len(lengths)), spec.max_new_tokens), tokenizer=make_tokenizer(),
            at_once=at_once, **more)
    finally:
        hook.remove()
    return out, noted


@pytest.mark.parametrize(("kind", "at_once"), [("gpt2", 1), ("llama", 8), ("bloom", 22)])
def test_samples_are_the_same_however_many_are_drawn_at_once(kind, at_once):
    lm = model_of(kind)
    head = build_value_head(lm, 0)
    head.outer.requires_grad_(False).weight.normal_(std=0.1)
    whole, _ = drawn(lm, COUNT, value_head=head)
    assert len(set(whole.mask.sum(1).tolist())) > 4
    some, rows = drawn(lm, at_once, value_head=head)
    assert max(rows) <= at_once
    assert_same_responses(some, whole)


@pytest.mark.parametrize("spec", [
    SamplingSpec(NEW, SPEC.stop_ids, min_new_tokens=6, top_k=5),
    SamplingSpec(NEW, (), stop_sequences=("good", "bad", "a"), min_new_tokens=3),
    SamplingSpec(NEW, SPEC.stop_ids, repetition_penalty=2.0)],
    ids=["shortest", "stop sequences", "penalty"])
def test_every_way_of_choosing_and_of_ending(spec):
    lm = model_of("gpt2")
    limits = (torch.tensor([1 + (5 * i) % NEW for i in range(COUNT)])
              if spec.repetition_penalty > 1 else None)
    whole, _ = drawn(lm, COUNT, spec, limits=limits)
    some, rows = drawn(lm, 5, spec, limits=limits)
    assert_same_responses(some, whole)
    assert max(rows) <= 5
    if limits is None:
        assert int(whole.mask.sum(1).min()) >= spec.min_new_tokens
    else:
        assert bool((whole.mask.sum(1) <= limits).all())


def test_places_are_refilled_so_that_passes_stay_full():
    lm = model_of("gpt2")
    whole, _ = drawn(lm, COUNT)
    _, rows = drawn(lm, 6)
    lengths = whole.mask.sum(1).tolist()
    batches = sum(max(lengths[start:start + 6]) for start in range(0, COUNT, 6))
    assert len(rows) < 0.85 * batches  # one batch after the other
    early = rows[:len(rows) // 2]
    assert sum(early) / len(early) > 3


def test_chunks_are_handed_over_as_soon_as_they_have_ended():
    lm = model_of("gpt2")
    whole, _ = drawn(lm, COUNT)
    passes, parts = [], []
    drawn(lm, 6, poll=lambda: passes.append(None), chunk=5,
          ready=lambda out: parts.append((out, len(passes))))
    assert [len(out.tokens) for out, _ in parts] == [5, 5, 5, 5, 3]
    when = [at for _, at in parts]
    assert when == sorted(when)
    assert when[0] < when[2] < when[-1] == len(passes)  # asked before every token whether to stop
    found = [row[mask].tolist() for out, _ in parts
             for row, mask in zip(out.tokens, out.mask, strict=True)]
    assert found == [row[mask].tolist() for row, mask in zip(whole.tokens, whole.mask, strict=True)]


def test_models_that_forget_keys_draw_one_batch_after_the_other():
    lm = model_of("mistral", sliding_window=4)
    assert not caches_all_keys(lm)
    whole, _ = drawn(lm, COUNT)
    some, rows = drawn(lm, 6)
    assert_same_responses(some, whole)
    lengths = whole.mask.sum(1).tolist()
    assert len(rows) == sum(max(lengths[start:start + 6]) for start in range(0, COUNT, 6))


def test_a_row_that_has_ended_among_younger_ones_takes_no_position_that_the_model_lacks():
    """The first row has no room for another token when it ends, and too few others end with it for
    it to be dropped."""
    lm = model_of("gpt2", n_positions=12)
    limits = torch.tensor([10] + [5] * 7 + [10] * 7)
    out, _ = drawn(lm, 8, SamplingSpec(10, ()), [2] * len(limits), limits=limits)
    assert torch.equal(out.mask.sum(1), limits)


def test_a_rollout_is_the_same_whatever_its_chunks(tmp_path):
    save_lm(tmp_path / "lm")
    whole, some = (rolled(small_config(
        tmp_path, ppo__num_rollouts=24, ppo__chunk_size=chunk, generation__max_new_tokens=NEW,
        generation__stop_token_ids=[5, 9, 14, 20, 27, 33],
        model__num_layers_unfrozen=1), start=24) for chunk in (24, 5))
    for name in ("response_tokens", "response_mask"):
        assert torch.equal(getattr(whole, name), getattr(some, name))
    for name in ("logprobs", "ref_logprobs", "values", "kl"):
        torch.testing.assert_close(getattr(whole, name), getattr(some, name), rtol=0, atol=5e-5)
    assert (whole.responses, whole.scores) == (some.responses, some.scores)
    states, others = whole.extras.frozen_states, some.extras.frozen_states
    for one, other in zip(states, others, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=5e-5)
