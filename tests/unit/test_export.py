"""Parts of an export: what is masked, how cards are written, and that a wrong copy is noticed."""

import json
from pathlib import Path

import pytest
from huggingface_hub import ModelCard

from ppocli.config.schema import TrainConfig
from ppocli.publish.card import Provenance, escaped, masked, render_card
from ppocli.runs.record import RunRecord
from ppocli.runs.run_folder import RunFolder


def test_secrets_are_hidden_and_home_is_a_tilde(monkeypatch, tmp_path):
    home = tmp_path / "me"
    for name, value in {"MY_API_KEY": "plain-looking-words", "EDITOR": "vim-is-no-secret",
                        "SHORT_TOKEN": "none", "HOME": str(home), "HF_TOKEN": "stored-by-hf-login",
                        "GOOGLE_CREDENTIALS": str(tmp_path)}.items():
        monkeypatch.setenv(name, value)
    text = ("plain-looking-words, stored-by-hf-login, vim-is-no-secret, none, "
            "hf_abcdefghijklmnopqrstuvwx, https://user:letmein@host/x")
    assert masked(text) == "***, ***, vim-is-no-secret, none, ***, https://user:***@host/x"
    assert masked(f"{tmp_path}/runs") == f"{tmp_path}/runs"
    assert masked(f"{home}/lm, {home}, {home}ter") == f"~/lm, ~, {home}ter"


@pytest.mark.parametrize(("text", "shown"), [
    ("a|b", r"a\|b"),
    ("<script>alert(1)</script>", r"&lt;script&gt;alert\(1\)&lt;/script&gt;"),
    ("![x](http://evil.example/p.png)", r"\!\[x\]\(http\://evil.example/p.png\)"),
    ("`code` *b* _i_ ~s~ $m$ # h", r"\`code\` \*b\* \_i\_ \~s\~ \$m\$ \# h"),
    ("two\nlines\x1b[31m", r"two ⏎ lines?\[31m"),
    ("x" * 400, "x" * 299 + "…")])
def test_text_shows_as_it_is(text, shown):
    assert escaped(text) == shown


def facts_of(folder: Path) -> Provenance:
    config = TrainConfig()
    config.model.path = "org/base"
    config.reward.fn = "/secret/place/rewards.py:score"
    config.prompts.path = "org/prompts"
    config.ppo.num_steps = 2
    return Provenance(
        name="tamed", step=2, license={"license": "mit"},
        run=RunRecord(RunFolder(folder), config, [], {"versions": {"torch": "2.6.0"}}, "finished"),
        before={"reward_mean": 0.1}, after={"reward_mean": 0.9, "metrics/good|bad": 2.0},
        samples=[({"prompt": "<b>hi</b>", "response": "a|b", "score": None},
                  {"prompt": "<b>hi</b>", "response": "[x](y)", "score": 0.5})])


def test_a_card(tmp_path):
    change = {"step": 1, "key": "ppo.optimizer.lr", "before": "0.001", "after": "<b>"}
    (tmp_path / "run.json").write_text(json.dumps({"run_id": "a", "changes": [change]}))
    text = render_card(tmp_path, facts_of(tmp_path), location="tester/tamed", dtype="fp32")
    data = ModelCard(text).data.to_dict()
    results = data.pop("model-index")
    assert data == {
        "base_model": "org/base", "base_model_relation": "finetune",
        "datasets": ["org/prompts"], "library_name": "transformers",
        "license": "mit", "pipeline_tag": "text-generation", "tags": ["ppo", "rlhf", "ppocli"]}
    metrics = [(m["type"], m["value"]) for m in results[0]["results"][0]["metrics"]]
    assert results[0]["name"] == "tamed"
    assert metrics == [("reward_mean", 0.9), ("metrics/good|bad", 2.0)]
    for line in ("[org/base](https://huggingface.co/org/base), fine-tuned with PPO",
                 "| reward | rewards.py:score |", "| `reward_mean` | 0.100 | 0.900 |",
                 r"| metrics/good\|bad | - | 2.000 |",
                 r"| &lt;b&gt;hi&lt;/b&gt; | a\|b | \[x\]\(y\) (0.50) |",
                 'name = "tester/tamed"', "ppocli train", "model.path=org/base",
                 "stored as fp32.", "Versions: torch 2.6.0.", "so it need not give the\nsame "
                 "numbers:\n\n- `ppo.optimizer.lr`: 0.001 until step 1, then &lt;b&gt;\n"):
        assert line in text
    assert "| reward | /secret" not in text
