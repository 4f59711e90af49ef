"""Decoding by transformers' own loop, for models that ours can't step, and finding out which those
are."""


import pytest
import torch
from helpers import make_lm, make_tokenizer, mostly_slow, save_lm
from sessions import (
    assert_own_logprobs,
    assert_same_responses,
    generate,
    prompt_and_response,
    rollout_of,
    session_of,
    small_config,
)
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from ppocli.config.schema import ModelConfig
from ppocli.errors import InputError
from ppocli.models.head import HeadWeights, token_logprobs
from ppocli.models.layout import lay_out
from ppocli.models.policy import build_value_head
from ppocli.models.trunk import Decoding, decoding_of, response_hidden, set_decoding
from ppocli.sampling.decoding import load_decodable, try_decoding
from ppocli.sampling.samples import SamplingSpec, uniform

pytestmark = pytest.mark.long

LENGTHS = (3, 5, 1, 5, 3, 2)


def model(kind, **over):
    lm = make_lm(kind, gain=3.0, **over).eval()
    lm.config.pad_token_id = None
    return lm


def prompts():
    mask = torch.arange(5).flip(0)[None, :] < torch.tensor(LENGTHS)[:, None]
    tokens = 4 + torch.arange(mask.numel()).reshape(mask.shape) * 7 % 30
    return tokens.masked_fill(~mask, 0), mask


def sample(lm, decoding, given, **words):
    set_decoding(lm, decoding)
    spec = SamplingSpec(**{"max_new_tokens": 8, "stop_ids": (1,), **given})
    head = build_value_head(lm, 0)
    torch.nn.init.constant_(head.outer.weight, 0.1)
    return generate(lm, *prompts(), spec, uniform(3, 1, range(len(LENGTHS)), spec.max_new_tokens),
                    tokenizer=make_tokenizer(), value_head=head,
                    start={"t5": 0, "bart": 2}.get(lm.config.model_type), **words)


SPECS = {
    "plain": {}, "greedy": {"do_sample": False}, "top-k": {"top_k": 5, "temperature": 0.7},
    "top-p": {"top_p": 0.6}, "min-p": {"min_p": 0.3}, "penalty": {"repetition_penalty": 3.0},
    "stop ids": {"stop_ids": tuple(range(1, 12))},
    "at least": {"stop_ids": tuple(range(1, 20)), "min_new_tokens": 3},
    "stop texts": {"stop_sequences": ("film", "is", "great", "dull", "we", "bad")},
}


@pytest.mark.parametrize(("kind", "name"), mostly_slow(
    ["gpt2", "llama", "t5", "bart"], SPECS, quick=lambda kind, name: (
        kind == "gpt2" or (kind, name) in (("t5", "at least"), ("t5", "stop texts"),
                                           ("bart", "penalty"), ("llama", "plain")))))
def test_both_loops_give_the_same_responses(kind, name):
    lm, given = model(kind), SPECS[name]
    wanted = sample(lm, Decoding.STEPS, given)
    assert_same_responses(sample(lm, Decoding.LIBRARY, given), wanted, atol=1e-5)
    assert wanted.values.abs().sum() > 0
    if "stop" in str(given):
        assert wanted.finished.any()
        assert wanted.mask.sum(1).unique().numel() > 1


@pytest.mark.parametrize("decoding", [Decoding.LIBRARY, Decoding.UNCACHED])
def test_each_response_has_a_limit_of_its_own(decoding):
    lm, limits = model("gpt2"), [1, 4, 2, 8, 3, 6]
    wanted = sample(lm, Decoding.STEPS, {"stop_ids": ()}, limits=limits)
    assert wanted.mask.sum(1).tolist() == limits
    assert_same_responses(sample(lm, decoding, {"stop_ids": ()}, limits=limits), wanted, atol=1e-5)


@pytest.mark.parametrize(("kind", "decoding"), [
    ("mamba", Decoding.LIBRARY), ("rwkv", Decoding.UNCACHED)])
def test_what_is_decoded_is_what_one_pass_over_right_padded_rows_gives(kind, decoding):
    """Of models whose states run on through padding: scoring and training see rows beside longer
    ones, and must find the probabilities that each token was drawn with alone."""
    lm = model(kind, **({"rescale_every": 0} if kind == "rwkv" else {}))
    out = sample(lm, decoding, {"stop_ids": tuple(range(1, 8))})
    assert out.mask.sum(1).unique().numel() > 1
    tokens, mask = prompts()

    def passes(rows):
        batch = lay_out(prompt_and_response(tokens[rows], mask[rows], out.tokens[rows],
                                            out.mask[rows]))
        with torch.no_grad():
            hidden = response_hidden(lm, batch)
            return token_logprobs(hidden, HeadWeights.of(lm), batch.targets,
                                  temperature=1.0, want_entropy=False)[0]

    together = passes(list(range(len(LENGTHS))))
    torch.testing.assert_close(together, out.logprobs[out.mask], rtol=1e-4, atol=1e-5)
    alone = torch.cat([passes([i]) for i in range(len(LENGTHS))])
    torch.testing.assert_close(together, alone, rtol=1e-4, atol=1e-5)


def test_the_models_own_generation_settings_do_not_leak_in():
    lm = model("mamba")
    wanted = sample(lm, Decoding.LIBRARY, {})
    lm.generation_config.update(
        top_k=1, temperature=0.1, do_sample=True, repetition_penalty=9.0, max_new_tokens=2,
        suppress_tokens=[5, 6], eos_token_id=[7, 8, 9], num_beams=2, use_cache=False)
    assert_same_responses(sample(lm, Decoding.LIBRARY, {}), wanted, atol=1e-5)


@pytest.mark.parametrize(("kind", "wanted"), [
    ("gpt2", Decoding.STEPS), ("bloom", Decoding.STEPS), ("t5", Decoding.STEPS),
    ("mamba", Decoding.LIBRARY)])
def test_the_fastest_way_that_is_right_is_found(kind, wanted):
    lm = model(kind)
    assert try_decoding(lm, {"t5": 0}.get(kind)) is wanted
    assert decoding_of(lm) is wanted


@pytest.mark.parametrize(("kind", "trusted"), [("gpt2", True), ("mamba", False)])
def test_a_cache_of_the_library_gives_no_old_logprobs(tmp_path, kind, trusted):
    """It was compared on short rows only, and DeepSeek-V4's errs on longer ones."""
    save_lm(tmp_path / "lm", kind, gain=2.0)
    with session_of(small_config(tmp_path)) as session:
        assert session.from_decode is trusted
        assert_own_logprobs(session.policy.lm, rollout_of(session))
    with session_of(small_config(tmp_path, ppo__logprobs_from="decode")) as session:
        assert session.from_decode


def test_a_model_whose_cache_is_wrong_reads_everything_anew():
    """transformers' RWKV mixes the rows of a batch once it steps with its state."""
    lm = model("rwkv", rescale_every=0)
    assert try_decoding(lm, None) is Decoding.UNCACHED
    one_row = sample(lm, Decoding.UNCACHED, {})
    assert not torch.equal(sample(lm, Decoding.LIBRARY, {}).tokens, one_row.tokens)


def test_a_model_that_looks_ahead_is_refused(tmp_path):
    torch.manual_seed(0)
    config = CONFIG_MAPPING["xlnet"](vocab_size=37, d_model=32, n_layer=2, n_head=2, d_inner=48)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "xlnet")
    with pytest.raises(InputError, match="look ahead") as refused:
        load_decodable(ModelConfig(path=str(tmp_path / "xlnet")))
    assert refused.value.where == "model.path"
    assert refused.value.fix == "use a causal language model"
