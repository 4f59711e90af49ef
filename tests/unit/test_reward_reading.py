"""What reward models made elsewhere read of a sample, against plain transformers and PEFT."""

import json
import logging

import pytest
import torch
from helpers import make_tokenizer, model_config
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

from ppocli.config.schema import RewardConfig
from ppocli.errors import InputError
from ppocli.ppo.policy_samples import joined
from ppocli.rewards.reward_records import RewardRequest, decode_request, encode_request
from ppocli.rewards.scoring import build_reward
from ppocli.runs.episode import Episode, Turn

TEMPLATE = ("{% for m in messages %}{{ {'user': 'you', 'assistant': 'i', 'system': 'we', 'tool': "
            "'it'}[m.role] }} {{ m.content }} {{ eos_token }}\n{% endfor %}"
            "{% if add_generation_prompt %}i {% endif %}")
ASKED = [[{"role": "user", "content": "the film was"}],
         [{"role": "system", "content": "very good"}, {"role": "user", "content": "it"}]]
RESPONSES = ["good", "very bad plot"]
CHATS = [[*asked, {"role": "assistant", "content": response}]
         for asked, response in zip(ASKED, RESPONSES, strict=True)]


def saved(folder, *, template=TEMPLATE, pad="<pad>", config=None, labels=1, chat=None):
    """A scorer of llama's kind with a tokenizer, as transformers saves it."""
    tokenizer = make_tokenizer()
    tokenizer.chat_template, tokenizer.pad_token = template, pad
    with torch.random.fork_rng():
        torch.manual_seed(3)
        model = AutoModelForSequenceClassification.from_config(model_config(
            "llama", num_labels=labels, pad_token_id=tokenizer.pad_token_id))
        for parameter in model.parameters():
            parameter.data += torch.randn_like(parameter) * 0.3 * (parameter.dim() > 1)
    for name, value in (config or {}).items():
        setattr(model.config, name, value)
    model.save_pretrained(folder)
    if chat is not None:
        tokenizer.init_kwargs["trained_with_chat_template"] = chat
    tokenizer.save_pretrained(folder)
    return str(folder)


def plain(folder, texts):
    """Scores of texts by transformers alone, one at a time."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForSequenceClassification.from_pretrained(folder).eval()
    with torch.no_grad():
        return [float(model(torch.tensor([tokenizer(text, add_special_tokens=False)["input_ids"]])
                            ).logits[0, 0]) for text in texts]


def request(responses=RESPONSES, **over):
    """Samples of a policy of another family, whose template is plain characters here."""
    return RewardRequest(**{
        "prompts": ["<|user|> the film was <|bot|>", "<|user|> it <|bot|>"],
        "responses": responses, "response_ids": [[1, 2]] * 2, "columns": {}, "tokenizer": None,
        "messages": ASKED} | over)


def scores(folder, asked=None, fn="reward_model", **kwargs):
    cfg = RewardConfig(fn=fn, kwargs={"model": folder, "device": "cpu", **kwargs})
    return build_reward(cfg).score(asked or request()).scores


def rendered(folder, chats=CHATS):
    tokenizer = AutoTokenizer.from_pretrained(folder)
    return [tokenizer.apply_chat_template(chat, tokenize=False) for chat in chats]


@pytest.mark.parametrize(("config", "pad", "trained", "kwargs", "text"), [
    ({}, "<eos>", None, {}, "{own}"),
    ({}, "<pad>", None, {"end": " film"}, "{own} film"),
    ({"score_front": True, "score_end": 1}, "<pad>", True, {}, "{ended}"),
    ({"score_front": True, "score_end": 1}, "<pad>", False, {}, "{policy}<eos>"),
    ({}, "<pad>", None, {"chat": False}, "{policy}"),
], ids=["own", "end", "ppocli", "ppocli-plain", "off"])
def test_conversations_are_read_through_the_models_own_template(
        tmp_path, caplog, config, pad, trained, kwargs, text):
    folder = saved(tmp_path / "rm", pad=pad, config=config, chat=trained)
    asked = request()
    forms = [{"own": own, "ended": own.rstrip(), "policy": prompt + response}
             for own, prompt, response in zip(rendered(folder), asked.prompts, RESPONSES,
                                              strict=True)]
    with caplog.at_level(logging.INFO):
        found = scores(folder, asked, **kwargs)
    assert found == pytest.approx(plain(folder, [text.format(**form) for form in forms]), abs=1e-5)
    said = [record.getMessage() for record in caplog.records if " reads " in record.getMessage()]
    assert ("own chat template" in said[0]) == ("own" in text or "ended" in text)
    assert any("trained on plain text" in line for line in said[1:]) == (trained is False)


def test_turns_of_an_episode_are_read_as_turns(tmp_path):
    folder = saved(tmp_path / "rm")
    turns = (Turn("good", 1, messages=({"role": "tool", "content": "a film"},)),
             Turn("very bad plot", 3, messages=({"role": "user", "content": "thanks"},)))
    context = ({"role": "user", "content": "the film was it"},)
    episodes = [Episode("", turns, "done"), Episode(" it", turns, "done", context=context)]
    chats = [one.conversation(asked) for one, asked in zip(episodes, ASKED, strict=True)]
    assert chats[1] == [*context, {"role": "assistant", "content": "good"},
                        {"role": "tool", "content": "a film"},
                        {"role": "assistant", "content": "very bad plot"}]
    asked = request(["good [tool] very bad plot"] * 2, episodes=episodes, chats=chats)
    expected = pytest.approx(plain(folder, rendered(folder, chats)), abs=1e-5)
    served = decode_request(encode_request(asked, slice(0, 2)))
    shares = [request(["x"], **{name: getattr(asked, name)[i:i + 1] for name in (
        "prompts", "response_ids", "messages", "chats", "episodes")}) for i in range(2)]
    for each in (asked, served, joined(shares, None)):
        assert scores(folder, each) == expected


def test_tools_are_rendered_as_in_training(tmp_path):
    template = "{% for t in tools or [] %}it {{ t.function.name }} {% endfor %}" + TEMPLATE
    folder = saved(tmp_path / "rm", template=template)
    described = [{"type": "function", "function": {"name": "good"}}]
    tokenizer = AutoTokenizer.from_pretrained(folder)
    texts = [tokenizer.apply_chat_template(CHATS[0], tools=described, tokenize=False),
             tokenizer.apply_chat_template(CHATS[1], tokenize=False)]
    assert texts[0].startswith("it good ")
    expected = plain(folder, texts)
    for cell in described, json.dumps(described):
        asked = request(columns={"tools": [cell, None]})
        assert scores(folder, asked) == pytest.approx(expected, abs=1e-5)
    steps = {"steps": [["good"], ["very bad", " plot"]], "step_ends": [[0], [0, 1]]}
    dense = build_reward(RewardConfig(fn="step_reward_model", kwargs={
        "model": folder, "device": "cpu"})).score(request(columns={"tools": [described, None]},
                                                          **steps)).dense
    assert [dense[0][0], dense[1][1]] == pytest.approx(expected, abs=1e-5)
    with pytest.raises(InputError, match="not a list of descriptions"):
        scores(folder, request(columns={"tools": ["a hammer", None]}))


# Heads and adapters -------------------------------------------------------------------------------

def test_an_adapter_is_a_reward(tmp_path, capfd):
    """On a base without a head of its own, against PEFT's own forward."""
    from peft import LoraConfig, PeftModel, get_peft_model

    base = tmp_path / "base"
    saved(base)
    AutoModelForCausalLM.from_config(model_config("llama")).save_pretrained(base)
    raw = AutoModelForSequenceClassification.from_pretrained(base, num_labels=1)
    made = get_peft_model(raw, LoraConfig(task_type="SEQ_CLS", r=4, target_modules=["q_proj"]))
    for name, parameter in made.named_parameters():
        if "lora" in name or "modules_to_save" in name:
            parameter.data.normal_(std=0.5)
    made.save_pretrained(tmp_path / "adapter")
    tokenizer = AutoTokenizer.from_pretrained(base)
    theirs = PeftModel.from_pretrained(AutoModelForSequenceClassification.from_pretrained(
        base, num_labels=1), tmp_path / "adapter").eval()
    with torch.no_grad():
        wanted = [float(theirs(input_ids=torch.tensor([tokenizer(
            text, add_special_tokens=False)["input_ids"]])).logits[0, -1])
            for text in rendered(base)]
    capfd.readouterr()
    assert scores(str(tmp_path / "adapter")) == pytest.approx(wanted, abs=1e-5)
    assert capfd.readouterr().err == ""
