"""Models with more rows than their tokenizer has ids (Qwen2.5, T5, any padded to a multiple of 64):
what is sampled, its probabilities and gradients are of the tokenizer's ids alone. The oracle is
transformers' own logits without the others."""

import json
from pathlib import Path

import pytest
import torch
from helpers import WORDS, make_tokenizer, refused, save_lm
from sessions import experience_of, gradients, refused_session, rollout_of, session_of, small_config
from transformers import AutoModelForCausalLM
from vllm_double import answering

from ppocli.config.schema import RolloutConfig
from ppocli.errors import ConfigError, InputError, SamplerError
from ppocli.models.head import Vocabulary
from ppocli.models.loading.tokenizer import stop_rules
from ppocli.ppo import caller_samples
from ppocli.sampling.vllm.server import Server

OUTSIDE = Path(__file__).parent.parent / "outside"
ROWS, IDS = 45, len(make_tokenizer())
GAPS = (4, 5, 6)


def save_padded(folder, kind="gpt2", gaps=(), **over):
    """A model of 45 rows; its tokenizer has the ids 0 to 36, or such that leave gaps."""
    save_lm(folder, kind, **{"vocab_size": ROWS, **over})
    make_tokenizer().save_pretrained(folder)
    if gaps:
        path = folder / "tokenizer.json"
        tokenizer = json.loads(path.read_text())
        vocabulary = tokenizer["model"]["vocab"]
        vocabulary.update({word: i + len(gaps) for word, i in vocabulary.items() if word in WORDS})
        path.write_text(json.dumps(tokenizer))
    return folder


def absent(gaps):
    return [*gaps, *range(IDS + len(gaps), ROWS)]


def masked(logits, gaps=()):
    """Without the ids that have no token: of probability 0."""
    return logits.double().index_fill(-1, torch.tensor(absent(gaps)), float("-inf"))


def own_pass(lm, rollout, row, start=None):
    """transformers' logits at each token of a response, and those tokens."""
    prompt = rollout.prompts.tokens[row][rollout.prompts.mask[row]]
    response = rollout.response_tokens[row][rollout.response_mask[row]]
    if start is None:
        return lm(input_ids=torch.cat([prompt, response])[None]).logits[0][-len(response) - 1:-1], \
            response
    before = torch.cat([torch.tensor([start]), response[:-1]])
    return lm(input_ids=prompt[None], decoder_input_ids=before[None]).logits[0], response


@pytest.mark.parametrize(("kind", "gaps", "keys"), [
    ("gpt2", (), {"ppo__logprobs_from": "forward", "ppo__chunk_size": 3}), ("t5", GAPS, {}),
    ("gpt2", GAPS, {"generation__top_p": 0.9, "generation__min_new_tokens": 2}),
    pytest.param("mamba", GAPS, {}, marks=pytest.mark.slow),
    pytest.param("gemma2", GAPS, {"generation__top_k": 40, "generation__repetition_penalty": 1.3},
                 marks=pytest.mark.slow)])
def test_ids_without_a_token_are_never_sampled_and_probabilities_are_of_the_others(
        tmp_path, kind, keys, gaps):
    # T5 doesn't scale its attention: large weights would make it jump
    save_padded(tmp_path / "lm", kind, gaps, gain=1.0 if kind == "t5" else 4.0)
    cfg = small_config(tmp_path, generation__temperature=0.7, **keys)
    with session_of(cfg) as session, torch.no_grad():
        rollout, lm = rollout_of(session), session.policy.lm
        assert not set(absent(gaps)) & set(rollout.response_tokens[rollout.response_mask].tolist())
        for row in range(len(rollout)):
            logits, response = own_pass(lm, rollout, row, session.loaded.decoder_start)
            expected = torch.log_softmax(masked(logits, gaps) / 0.7, -1).gather(
                -1, response[:, None])[:, 0]
            for result in (rollout.logprobs, rollout.ref_logprobs):
                torch.testing.assert_close(result[row, :len(expected)].double(), expected, rtol=0,
                                           atol=3e-5)


@pytest.mark.parametrize(("gaps", "kl"), [((), "k1"), (GAPS, "full")])
def test_rows_without_a_token_have_no_gradient(tmp_path, gaps, kl):
    """With entropy, and a KL in the loss; the output embedding is one of its own."""
    save_padded(tmp_path / "lm", "llama", gaps, tie_word_embeddings=False)
    cfg = small_config(tmp_path, ppo__ent_coef=0.1, ppo__kl_in="loss", ppo__kl_estimator=kl)
    with session_of(cfg) as session:
        grads, terms = gradients(session, experience_of(session))
    grad = grads["lm.lm_head.weight"]
    assert not grad[absent(gaps)].any()
    assert grad[:4].any()
    assert all(torch.isfinite(torch.tensor(value)) for value in terms.values())


@pytest.mark.parametrize(("rows", "theirs"), [(IDS, ROWS), (60, ROWS)])
def test_a_reference_and_a_critic_may_have_other_numbers_of_rows(tmp_path, rows, theirs):
    save_padded(tmp_path / "lm", vocab_size=rows)
    save_padded(tmp_path / "other", "llama", seed=3, vocab_size=theirs)
    other = str(tmp_path / "other")
    cfg = small_config(tmp_path, model__reference__path=other, ppo__kl_estimator="full",
                       model__value__kind="model", model__value__path=other)
    with session_of(cfg) as session, torch.no_grad():
        rollout, reference = rollout_of(session), AutoModelForCausalLM.from_pretrained(other)
        for row in range(len(rollout)):
            logits, response = own_pass(session.policy.lm, rollout, row)
            log_p, log_q = (torch.log_softmax(one[:, :IDS].double(), -1) for one in (
                logits, own_pass(reference, rollout, row)[0]))
            count = len(response)
            torch.testing.assert_close(rollout.ref_logprobs[row, :count].double(), log_q.gather(
                -1, response[:, None])[:, 0], rtol=0, atol=3e-5)
            torch.testing.assert_close(rollout.kl[row, :count].double(),
                                       (log_p.exp() * (log_p - log_q)).sum(-1), rtol=0, atol=3e-5)


def test_a_tokenizer_with_tokens_that_the_model_lacks_is_refused(tmp_path):
    save_padded(tmp_path / "lm")
    tokenizer = make_tokenizer()
    tokenizer.add_tokens([f"<new{i}>" for i in range(ROWS - IDS + 1)])
    tokenizer.save_pretrained(tmp_path / "lm")
    refused_session(small_config(tmp_path), InputError, f"ids up to {ROWS}", f"only {ROWS}")


def test_a_server_is_told_not_to_sample_ids_without_a_token_and_refused_if_it_does():
    reply = {"choices": [{"token_ids": [40], "finish_reason": "stop", "logprobs": {"content": [
        {"token_id": 40, "logprob": -1.0}]}, "weight_versions": [{"version": "x"}]}]}
    with answering(200, reply) as (plain, bodies):
        server = Server(plain.url, RolloutConfig(), Vocabulary(ROWS, IDS))
        with refused(SamplerError, "can't have sampled"):
            server.generate([4], {"max_tokens": 8})
    assert bodies[0]["sampling_params"]["logit_bias"] == {str(i): -1e9 for i in range(IDS, ROWS)}


def test_what_names_ids_without_a_token_is_refused(tmp_path):
    save_padded(tmp_path / "lm", gaps=GAPS)
    with session_of(small_config(tmp_path)) as session:
        for token in (4, ROWS - 1):
            session.cfg.generation.stop_token_ids = [token]
            with refused(ConfigError, f"Token {token} would never end", "stop_token_ids"):
                stop_rules(session.tokenizer, session.loaded, session.cfg.generation)
            with refused(ConfigError, f"{token} is no token id", "responses[0]"):
                caller_samples.chunks_of(session, session.context(), ["the film"], [[9, token]], 0)
    # a sampler of the user's own that takes logits as they come
    cfg = small_config(tmp_path, rollout__engine=f"{OUTSIDE / 'slow_sampler.py'}:Whole")
    with session_of(cfg) as session, refused(ConfigError, "Whole sampled id", "no token"):
        rollout_of(session)
