"""Encoder-decoders: the same invariants as for causal models, and transformers' own numbers."""

import pytest
import torch
from helpers import PAIRS, make_tokenizer, mostly_slow, save_lm
from runs import app_in_process, assert_equal_runs, copied, resumed
from sessions import count_letters, experience_of, optimize, rollout_of, session_of, small_config
from tokenizers.processors import TemplateProcessing
from transformers import AutoModelForSeq2SeqLM

from ppocli.config.schema import PromptsConfig
from ppocli.data.prompt_set import load_prompts

pytestmark = pytest.mark.long


def pair_config(tmp_path, kind, **over):
    save_lm(tmp_path / "lm", kind, gain=2.0)
    return small_config(tmp_path, ppo__chunk_size=5, **over)


def theirs_and_ours(folder, rollout, temperature=1.0):
    """For each sample what transformers gives its tokens, and what the rollout and its reference
    gave them."""
    lm = AutoModelForSeq2SeqLM.from_pretrained(folder, attn_implementation="eager").eval()
    named = getattr(lm.config, "decoder_start_token_id", None)
    start = torch.tensor([lm.generation_config.bos_token_id if named is None else named])
    for i, mask in enumerate(rollout.response_mask):
        prompt = rollout.prompts.tokens[i][rollout.prompts.mask[i]]
        response = rollout.response_tokens[i][mask]
        given = torch.cat([start, response[:-1]])[None]
        with torch.no_grad():  # without a mask, T5Gemma would leave out what pads, also if sampled
            logits = lm(input_ids=prompt[None], decoder_input_ids=given,
                        decoder_attention_mask=torch.ones_like(given)).logits[0]
        wanted = torch.log_softmax(logits / temperature, -1).gather(1, response[:, None])[:, 0]
        yield wanted, rollout.logprobs[i][mask], rollout.ref_logprobs[i][mask]


@pytest.mark.parametrize(("kind", "source"), mostly_slow(
    [*PAIRS, "led", "t5gemma"], ["decode", "forward"], quick=lambda kind, source: (
        kind, source) in (("t5", "forward"), ("bart", "decode"), ("t5gemma", "decode"))))
def test_logprobs_are_those_of_transformers_at_the_temperature(tmp_path, kind, source):
    cfg = pair_config(tmp_path, kind, generation__temperature=0.7, ppo__logprobs_from=source,
                      generation__stop_token_ids=[4, 5, 6, 7, 8, 9])
    with session_of(cfg) as session:
        rollout = rollout_of(session)
    assert len(set(rollout.response_mask.sum(1).tolist())) > 1
    for wanted, *found in theirs_and_ours(tmp_path / "lm", rollout, 0.7):
        for got in found:
            torch.testing.assert_close(got, wanted, rtol=0, atol=2e-5)
    assert rollout.kl.abs().max() <= 1e-5


@pytest.mark.parametrize("kind", mostly_slow(
    [*PAIRS, "t5gemma"], quick=lambda kind: kind == "t5"))
def test_only_the_decoder_s_top_trains_if_wanted(tmp_path, kind):
    cfg = pair_config(tmp_path, kind, model__num_layers_unfrozen=1, ppo__optimizer__lr=0.01)
    with session_of(cfg, reward=count_letters) as session:
        trained = {n for n, p in session.policy.lm.named_parameters() if p.requires_grad}
        assert trained
        assert not any(".encoder." in name or "shared" in name for name in trained)
        optimize(session, experience_of(session))
        later = rollout_of(session, start=100)
    for of_base, _, reference in theirs_and_ours(tmp_path / "lm", later):
        torch.testing.assert_close(reference, of_base, rtol=0, atol=2e-5)
    assert later.kl.abs().max() > 1e-4


def test_what_a_tokenizer_puts_behind_a_text_goes_to_an_encoder_only():
    tokenizer = make_tokenizer()
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="$A <eos>", special_tokens=[("<eos>", tokenizer.eos_token_id)])
    cfg = PromptsConfig(items=["the film was good", "it"], max_length=3)
    end = tokenizer.eos_token_id
    causal, encoder = (load_prompts(cfg, tokenizer, seed=0, max_prompt_tokens=9, whole=whole)
                       for whole in (False, True))
    film, was, good, it = tokenizer.convert_tokens_to_ids(["film", "was", "good", "it"])
    assert causal.token_ids == [[film, was, good], [it]]
    assert encoder.token_ids == [[was, good, end], [it, end]]


@pytest.mark.slow
def test_train_resume_export_eval_and_generate(tmp_path, command, capsys, monkeypatch):
    """What a user does, with an encoder-decoder."""
    monkeypatch.chdir(tmp_path)
    save_lm(tmp_path / "t5", "t5", gain=2.0)
    (tmp_path / "prompts.txt").write_text("the film\ni saw\nthis plot was\nit\n")
    (tmp_path / "letters.py").write_text(
        "def letters(outputs, **_):\n    return [len(o) / 10 for o in outputs]\n")
    words = ["model.path=t5", "prompts.path=prompts.txt", "reward.fn=letters.py:letters",
             "ppo.num_steps=2", "ppo.num_rollouts=8", "ppo.mini_batch_size=4",
             "generation.max_new_tokens=6", "checkpoint.every_steps=1", "checkpoint.keep_last=9",
             "hardware.device=cpu"]
    command(*words, "run_name=straight", code=0)
    stopped = copied(tmp_path / "runs/straight", tmp_path / "runs/stopped", 1)
    resumed(stopped)
    assert_equal_runs(tmp_path / "runs/straight", stopped)
    model, info = AutoModelForSeq2SeqLM.from_pretrained("runs/straight/model",
                                                        output_loading_info=True)
    assert not info["missing_keys"]
    assert model.generation_config.decoder_start_token_id == 0
    for line in (["export", "runs/straight", "-o", "out"],
                 ["eval", "runs/straight", "--limit", "2"],
                 ["generate", "runs/straight", "--prompt", "the film"]):
        app_in_process(capsys)(*line, code=0)
    assert "AutoModelForSeq2SeqLM" in (tmp_path / "out/README.md").read_text()
