"""The built-in classifier and reward model on tiny real models."""

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import refused
from sessions import session_of, small_config
from tokenizers import Tokenizer, models, pre_tokenizers
from tokenizers.processors import TemplateProcessing
from transformers import (
    DistilBertConfig,
    DistilBertForSequenceClassification,
    GPT2Config,
    GPT2ForSequenceClassification,
    GPT2LMHeadModel,
    PreTrainedTokenizerFast,
)

from ppocli.config.schema import RewardConfig
from ppocli.errors import InputError, RewardError
from ppocli.ppo.ppo_task import PPOTask
from ppocli.rewards.reward_model import RewardModel, StepRewardModel, TextClassifier
from ppocli.rewards.scoring import build_reward

WORDS = ["good", "bad", "film", "the", "a", "was", "plot", "very", "so", "dull"]
SPECIALS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "<eos>"]
TEXTS = ["good film", "the plot was very very dull so bad", "a", "", "bad bad bad the film was so",
         "the film", "a very good plot"]


def tokenizer_of(kind: str, **names: Any) -> PreTrainedTokenizerFast:
    vocabulary = {word: i for i, word in enumerate(SPECIALS + WORDS)}
    core = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    core.pre_tokenizer = pre_tokenizers.Whitespace()
    if kind == "bert":
        core.post_processor = TemplateProcessing(
            single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B [SEP]",
            special_tokens=[("[CLS]", 2), ("[SEP]", 3)])
        names = {"pad_token": "[PAD]", "cls_token": "[CLS]", "sep_token": "[SEP]", **names}
    if kind == "appends_eos":
        core.post_processor = TemplateProcessing(single="$A <eos>", special_tokens=[("<eos>", 4)])
        names = {"eos_token": "<eos>", **names}
    return PreTrainedTokenizerFast(tokenizer_object=core, unk_token="[UNK]", **names)


def spread(model: torch.nn.Module) -> torch.nn.Module:
    """Weights large enough that different texts get clearly different scores."""
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, 0.5)
    return model.eval()


def save(folder: Path, model: torch.nn.Module, tokenizer: Any) -> Path:
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def bert(folder: Path, labels: Sequence[str] = ("negative", "POSITIVE"), **options: Any) -> Path:
    config = DistilBertConfig(
        vocab_size=len(SPECIALS + WORDS), dim=16, hidden_dim=32, n_layers=2, n_heads=2,
        max_position_embeddings=12, id2label=dict(enumerate(labels)),
        label2id={label: i for i, label in enumerate(labels)}, **options)
    return save(folder, spread(DistilBertForSequenceClassification(config)), tokenizer_of("bert"))


GPT2 = GPT2Config(vocab_size=len(SPECIALS + WORDS), n_embd=16, n_layer=2, n_head=2, n_positions=12,
                  bos_token_id=4, eos_token_id=4, num_labels=1)


def gpt2_rm(folder: Path, kind: str = "plain", **options: Any) -> Path:
    model = GPT2ForSequenceClassification(GPT2)
    return save(folder, spread(model), tokenizer_of(kind, **options))


def raw_logits(folder: Path, kind: type, *texts: str) -> list[float]:
    """The model's outputs for one text or pair on its own, without padding."""
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    ids = tokenizer(*texts, truncation=True, max_length=12)["input_ids"] or [4]
    model = kind.from_pretrained(folder).eval()
    with torch.no_grad():
        return model(input_ids=torch.tensor([ids])).logits[0].tolist()


def call(scorer: Any, texts: Sequence[str]) -> list[float]:
    texts = list(texts)
    return scorer(samples=texts, prompts=[""] * len(texts), responses=texts)


def test_the_label_is_picked_by_name(tmp_path):
    labels = ("neutral", "POSITIVE", "negative")
    folder = bert(tmp_path / "m", labels)
    position = labels.index("POSITIVE")
    logits = [raw_logits(folder, DistilBertForSequenceClassification, text) for text in TEXTS]
    scorer = TextClassifier(str(folder), output="logit")
    assert call(scorer, TEXTS) == pytest.approx([row[position] for row in logits], abs=1e-5)
    expected = [torch.tensor(row).softmax(0)[position].item() for row in logits]
    for label in ("POSITIVE", "positive"):
        scorer = TextClassifier(str(folder), label=label)
        assert call(scorer, TEXTS) == pytest.approx(expected, abs=1e-5)
    assert max(expected) - min(expected) > 0.01


def test_multi_label_and_one_label_use_the_sigmoid(tmp_path):
    several = bert(tmp_path / "a", problem_type="multi_label_classification")
    one = bert(tmp_path / "b", labels=("toxic",))
    for folder, label, position in ((several, "POSITIVE", 1), (one, "toxic", 0)):
        logit = raw_logits(folder, DistilBertForSequenceClassification, TEXTS[1])[position]
        score = call(TextClassifier(str(folder), label=label), [TEXTS[1]])
        assert score == pytest.approx([torch.tensor(logit).sigmoid().item()], abs=1e-5)


def test_an_absent_label_lists_those_there_are(tmp_path):
    folder = bert(tmp_path / "m")
    with refused(RewardError, "'POSITIV'", "Did you mean 'POSITIVE'?", "negative, POSITIVE",
                 "reward.kwargs.label"):
        TextClassifier(str(folder), label="POSITIV")


def test_scores_do_not_depend_on_the_batch(tmp_path):
    classifier = TextClassifier(str(bert(tmp_path / "c")), batch_size=2)
    scorer = RewardModel(str(gpt2_rm(tmp_path / "r")), batch_size=2)
    for each in (classifier, scorer):
        alone = [call(each, [text])[0] for text in TEXTS]
        assert call(each, TEXTS) == pytest.approx(alone, abs=1e-5)
        assert call(each, TEXTS[::-1]) == pytest.approx(alone[::-1], abs=1e-5)


@pytest.mark.parametrize(("kind", "names"), [
    ("plain", {}),
    ("plain", {"pad_token": "[PAD]", "padding_side": "left"}),
    ("appends_eos", {"pad_token": "<eos>"})])
def test_the_score_is_read_at_the_last_token(tmp_path, kind, names):
    folder = gpt2_rm(tmp_path / "m", kind, **names)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    model = GPT2ForSequenceClassification.from_pretrained(folder).eval()
    expected = []
    for text in TEXTS:  # hidden state of the last token, by hand
        filler = tokenizer.eos_token_id or tokenizer.pad_token_id or 0
        ids = tokenizer(text)["input_ids"] or [filler]
        with torch.no_grad():
            hidden = model.transformer(torch.tensor([ids])).last_hidden_state
            expected.append(model.score(hidden[0, -1]).item())
    assert call(RewardModel(str(folder)), TEXTS) == pytest.approx(expected, abs=1e-5)
    assert max(expected) - min(expected) > 0.1


def test_long_texts_are_cut_and_said_once(tmp_path, caplog):
    long = "bad " * 30 + "good film"
    folder = gpt2_rm(tmp_path / "r")
    scorer = RewardModel(str(folder))
    with caplog.at_level(logging.WARNING):
        score = call(scorer, [long, "a"])
        call(scorer, [long])
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == 1
    assert "at most 12 tokens: 1 of 2 texts were cut on the left" in said[0]
    end = raw_logits(folder, GPT2ForSequenceClassification, "bad " * 10 + "good film")
    assert score[0] == pytest.approx(end[0], abs=1e-5)


def test_samples_responses_and_pairs(tmp_path):
    folder = bert(tmp_path / "m")
    prompts, responses = ["the film was ", "so "], ["good", "very dull"]
    samples = [p + r for p, r in zip(prompts, responses, strict=True)]

    def scores(on):
        return TextClassifier(str(folder), on=on, output="logit")(
            samples=samples, prompts=prompts, responses=responses)

    def alone(*texts):
        return raw_logits(folder, DistilBertForSequenceClassification, *texts)[1]

    assert scores("sample") == pytest.approx([alone(s) for s in samples], abs=1e-5)
    assert scores("response") == pytest.approx([alone(r) for r in responses], abs=1e-5)
    assert scores("pair") == pytest.approx(
        [alone(p, r) for p, r in zip(prompts, responses, strict=True)], abs=1e-5)


def test_steps_are_scored_up_to_their_ends(tmp_path):
    folder = gpt2_rm(tmp_path / "rm")
    cuts = [["good ", "film"], [], ["bad "]]
    asked = {"prompts": ["the ", "a ", "so "], "responses": ["good film", "", "bad "],
             "samples": ["the good film", "a ", "so bad "], "steps": cuts}
    wanted = [[raw_logits(folder, GPT2ForSequenceClassification, text)[0] for text in texts]
              for texts in (("the good ", "the good film"), (), ("so bad ",))]
    found = StepRewardModel(str(folder), device="cpu")(**asked)
    for mine, theirs in zip(found, wanted, strict=True):
        assert mine == pytest.approx(theirs, abs=1e-5)
    first, second = wanted[0]
    gains = StepRewardModel(str(folder), device="cpu", difference=True, batch_size=1)(**asked)
    assert gains[0] == pytest.approx([first, second - first], abs=1e-5)
    assert gains[2] == pytest.approx(wanted[2], abs=1e-5)


def test_an_untrained_head_is_refused(tmp_path, capfd):
    folder = save(tmp_path / "base", GPT2LMHeadModel(GPT2), tokenizer_of("plain"))
    capfd.readouterr()
    with refused(InputError, "score.weight", "random") as caught:
        RewardModel(str(folder))
    assert caught.value.exit_code == 3
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize(("damage", "words"), [
    (lambda folder: [path.unlink() for path in folder.glob("tokenizer*")], "No tokenizer in"),
    (lambda folder: (folder / "model.safetensors").unlink(), "no weights in")])
def test_broken_folders_name_the_file(tmp_path, damage, words):
    folder = bert(tmp_path / "m")
    damage(folder)
    with refused(InputError, words, str(folder), "reward.kwargs.model"):
        build_reward(RewardConfig(fn="classifier", kwargs={"model": str(folder)}))


@pytest.fixture
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)


def test_missing_models(tmp_path, monkeypatch, offline):
    monkeypatch.chdir(tmp_path)
    for model, words in {
        "./nope": ["Folder ./nope does not exist", str(tmp_path)],
        "someone/absent-model": ["'someone/absent-model' is not on this machine",
                                 "HF_HUB_OFFLINE=1 forbids downloading",
                                 "hf download someone/absent-model"],
        "not a name": ["neither a folder nor a Hub name"],
    }.items():
        with refused(InputError, *words, "reward.fns.taste.kwargs.model") as caught:
            build_reward(RewardConfig(fns={"taste": {"fn": "reward_model",
                                                     "kwargs": {"model": model}}}))
        assert "reward.kwargs" not in str(caught.value)


def test_evaluations_under_other_weights_of_a_reward_model_are_not_comparable(tmp_path):
    cfg, found = small_config(tmp_path, reward__fn="reward_model", reward__kwargs={
        "model": str(gpt2_rm(tmp_path / "judge"))}), set()
    for _ in range(2):
        with session_of(cfg, reward=None) as session:
            found.add(PPOTask(session).resume.eval_fingerprint())
            model = session.reward.parts[0].call.model
            model.score.weight.mul_(2.0)
            model.save_pretrained(tmp_path / "judge")
    assert len(found) == 2
