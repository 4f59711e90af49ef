"""Answers outside of training: numbering of the random numbers, and text that appears as it grows.
"""

import pytest
import torch
from data_tokenizers import ids, utf8_bytes, words
from helpers import save_lm

from ppocli.config.schema import ModelConfig, TrainConfig
from ppocli.errors import ConfigError, DivergedError
from ppocli.evaluation.player import changed_sampling, load_player
from ppocli.sampling.decode_state import Decoder
from ppocli.sampling.prompting import TextStream, answer_prompts, prompt_ids
from ppocli.sampling.samples import SamplingSpec, decode_responses

PROMPTS = ["the film", "i saw", "this plot was", "it"]


def streamed(tokenizer, prompt, tokens, stops=()):
    """The pieces of a response that grows by a token at a time, and its whole text."""
    spec = SamplingSpec(9, (), stop_sequences=tuple(stops))
    stream = TextStream(tokenizer, prompt, spec)
    pieces = [stream.push(tokens[:n]) for n in range(1, len(tokens) + 1)]
    text = decode_responses(tokenizer, [prompt], [tokens], spec)[0]
    return [*pieces, stream.close(text)], text


@pytest.mark.parametrize("text", ["a fine film.\n\nYes", "🎬🎞 très bon 映画"])
def test_pieces_are_the_text_and_hold_whole_characters(text):
    tokenizer = utf8_bytes()
    prompt, tokens = tokenizer("It was")["input_ids"], tokenizer(text)["input_ids"]
    pieces, whole = streamed(tokenizer, prompt, tokens)
    assert whole == text
    assert "".join(pieces) == text
    assert len(tokens) == len(text.encode())
    assert sum(bool(piece) for piece in pieces) > len(text) / 3  # it does come in pieces
    assert not any("\N{REPLACEMENT CHARACTER}" in piece for piece in pieces)


@pytest.mark.parametrize(("said", "kept"), [
    ("good\nUser: and", "good"), ("good\nUse it", "good\nUse it"), ("a café", "a ")])
def test_what_may_become_a_stop_sequence_is_held_back(said, kept):
    tokenizer = utf8_bytes()
    pieces, text = streamed(tokenizer, tokenizer("so ")["input_ids"], tokenizer(said)["input_ids"],
                            ("\nUser:", "café"))
    assert text == kept
    assert "".join(pieces) == kept
    before = "".join(pieces[:-1])
    assert kept.startswith(before)
    if said != kept:
        assert before == kept.rstrip()


@pytest.fixture(scope="module")
def player(tmp_path_factory):
    folder = save_lm(tmp_path_factory.mktemp("player") / "lm")
    return load_player(ModelConfig(path=str(folder)), "lm")


def sample(player, prompts, num_samples=1, **more):
    generation = changed_sampling(TrainConfig(), {"max_new_tokens": 12, "min_new_tokens": 2})
    asked = player.tokens(prompts, generation)
    return {(answer.prompt, answer.sample): answer
            for batch in player.answers(asked, generation, seed=3, num_samples=num_samples, **more)
            for answer in batch}


def test_a_sample_does_not_depend_on_how_many_are_asked_for(player):
    few, many = sample(player, PROMPTS[:1]), sample(player, PROMPTS, 5)
    assert set(many) == {(i, k) for i in range(4) for k in range(5)}
    assert few[0, 0] == many[0, 0]
    for i in range(4):
        assert sample(player, PROMPTS[:i + 1], 2)[i, 1] == many[i, 1]
    assert len({many[0, k].text for k in range(5)}) > 1
    assert sample(player, PROMPTS, 5, batch=3) == many
    # the second prompt asked alone, told its number
    assert sample(player, PROMPTS[1:2], first=1)[0, 0].text == many[1, 0].text


def test_prompts_that_close_with_eos_or_start_with_bos():
    tokenizer = words(front=True, behind=True)
    assert prompt_ids(tokenizer, ["the film"]) == [ids("<s> the film")]
    assert prompt_ids(tokenizer, ["the film"], rendered=True) == [ids("the film")]
    assert prompt_ids(tokenizer, ["the film"], whole=True) == [ids("<s> the film </s>")]
    # one that was typed stays, as in training
    assert prompt_ids(tokenizer, ["the film </s>"]) == [ids("<s> the film </s>")]
    assert prompt_ids(words(), ["the film </s>"]) == [ids("the film </s>")]
    with pytest.raises(ConfigError, match="has no tokens"):
        prompt_ids(words(), [""])


def test_a_broken_model_is_told(tmp_path):
    player = load_player(ModelConfig(path=str(save_lm(tmp_path / "lm"))), "lm")
    with torch.no_grad():
        player.loaded.lm.transformer.ln_f.weight[:] = float("nan")
    decoder = Decoder(player.loaded.lm, SamplingSpec(4, (1,)), player.tokenizer)
    with pytest.raises(DivergedError, match="not finite"):
        list(answer_prompts(decoder, [[4, 5]], seed=0))


def test_changes_of_sampling_are_checked():
    cfg = TrainConfig()
    cfg.generation.eval.min_new_tokens = 20  # at evaluation only
    changed = changed_sampling(cfg, {"max_new_tokens": 5, "stop_sequences": ["."]})
    assert (changed.max_new_tokens, changed.stop_sequences) == (5, ["."])
    cfg.generation.length_sampler = [5, 12]  # a length that is asked for is not drawn
    cfg.reward.missing_eos_penalty = 1.0  # nor are there penalties outside of training
    assert changed_sampling(cfg, {"min_new_tokens": 6, "ignore_eos": True}).length_sampler is None
    assert changed_sampling(cfg, {"top_k": 3}, draws=True).length_sampler == [5, 12]
    with pytest.raises(ConfigError) as wrong:
        changed_sampling(cfg, {"temperature": 0.0, "top_p": 2.0})
    assert "generation.temperature: 0 must be" in str(wrong.value)
    assert "generation.top_p: 2 must be" in str(wrong.value)
