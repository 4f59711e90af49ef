"""Parts of an export: what is masked, how cards are written, how weights are cut and compared."""

import json
from pathlib import Path

import pytest
import torch
from helpers import make_lm, make_tokenizer
from huggingface_hub import ModelCard
from huggingface_hub.utils import validate_repo_id
from safetensors.torch import load_file, save_file

from ppocli.config.schema import EnvConfig, RewardConfig, TrainConfig
from ppocli.errors import CheckpointError, ConfigError, InputError
from ppocli.export.card import escaped, render_card, reward_names, user_text
from ppocli.export.facts import Facts, Mask, license_of
from ppocli.export.request import check_repo_id, parse_size, repo_name
from ppocli.export.weights import (
    compare_tokenizers,
    compare_weights,
    dtype_of,
    logits_of,
    plan_files,
    stored_tensors,
    write_weights,
)
from ppocli.runs.record import RunRecord
from ppocli.storage.run_folder import RunFolder

NO_MASK = Mask({})


def free() -> None:
    """Nothing asks to stop."""


class TestMask:
    def test_secrets_of_every_kind_are_hidden(self):
        mask = Mask({"MY_API_KEY": "plain-looking-words", "EDITOR": "vim-is-no-secret",
                     "SHORT_TOKEN": "none"}, tokens=("stored-by-hf-login",))
        text = ("plain-looking-words, stored-by-hf-login, vim-is-no-secret, none, "
                "hf_abcdefghijklmnopqrstuvwx, https://user:letmein@host/x")
        assert mask(text) == "***, ***, vim-is-no-secret, none, ***, https://user:***@host/x"

    def test_paths_are_no_secrets_and_home_is_a_tilde(self, tmp_path):
        mask = Mask({"PWD": str(tmp_path), "GOOGLE_CREDENTIALS": str(tmp_path)})
        assert mask(f"{tmp_path}/runs") == f"{tmp_path}/runs"
        home = Mask({}, home=tmp_path)
        assert home(f"{tmp_path}/lm, {tmp_path}, {tmp_path}ter") == f"~/lm, ~, {tmp_path}ter"


@pytest.mark.parametrize(("reward", "env", "named"), [
    (RewardConfig(fn="/home/me/mine.py:score"), EnvConfig(), "mine.py:score"),
    (RewardConfig(fns={"a": {"fn": "length"}, "b": {"fn": "pkg.mine:score"}}), EnvConfig(),
     "length, pkg.mine:score"),
    (RewardConfig(), EnvConfig(fn="guess_number"), "guess_number")])
def test_a_card_names_what_rewards(reward, env, named):
    assert reward_names(TrainConfig(reward=reward, env=env)) == named


class TestEscaping:
    @pytest.mark.parametrize(("text", "shown"), [
        ("a|b", r"a\|b"),
        ("<script>alert(1)</script>", r"&lt;script&gt;alert\(1\)&lt;/script&gt;"),
        ("![x](http://evil.example/p.png)", r"\!\[x\]\(http\://evil.example/p.png\)"),
        ("www.evil.example @someone", r"www\.evil.example \@someone"),
        ("`code` *b* _i_ ~s~ $m$ # h", r"\`code\` \*b\* \_i\_ \~s\~ \$m\$ \# h"),
        ("two\nlines\x1b[31m", r"two ⏎ lines?\[31m"),
        ("it was fine, 10.5 of 10: really.", "it was fine, 10.5 of 10: really."),
        ("x" * 400, "x" * 299 + "…")])
    def test_text_shows_as_it_is(self, text, shown):
        assert escaped(text) == shown


def run_record(tmp_path: Path, **row: float) -> RunRecord:
    """A run with two rows, as its folder would tell it."""
    config = TrainConfig()
    config.model.path = "org/base"
    config.reward.fn = "/secret/place/rewards.py:score"
    config.prompts.path = "org/prompts"
    config.ppo.num_steps = 2
    return RunRecord(RunFolder(tmp_path / "tamed"), config,
                     [{"step": 0, "eval/reward_mean": 0.1}, {"step": 2, **row}], None, "finished")


def facts_of(run: RunRecord) -> Facts:
    return Facts(
        name="tamed", step=2, run=run, license={"license": "mit"},
        before={"reward_mean": 0.1}, after={"reward_mean": 0.9, "metrics/good|bad": 2.0},
        samples=[({"prompt": "<b>hi</b>", "response": "a|b", "score": None},
                  {"prompt": "<b>hi</b>", "response": "[x](y)", "score": 0.5})],
        versions={"torch": "2.6.0"}, command="ppocli train model.path=org/base")


def card_of(facts: Facts) -> str:
    return render_card(facts, Path("nowhere"), None, NO_MASK, dtype="fp32",
                       location="tester/tamed", value_head=[], curve=True)


class TestCard:
    def test_metadata_are_what_the_hub_reads(self, tmp_path):
        data = ModelCard(card_of(facts_of(run_record(tmp_path)))).data.to_dict()
        results = data.pop("model-index")
        assert data == {
            "base_model": "org/base", "base_model_relation": "finetune",
            "datasets": ["org/prompts"], "library_name": "transformers",
            "license": "mit", "pipeline_tag": "text-generation", "tags": ["ppo", "rlhf", "ppocli"]}
        metrics = [(m["type"], m["value"]) for m in results[0]["results"][0]["metrics"]]
        assert results[0]["name"] == "tamed"
        assert metrics == [("reward_mean", 0.9), ("metrics/good|bad", 2.0)]

    def test_text(self, tmp_path):
        text = card_of(facts_of(run_record(tmp_path)))
        for line in ("[org/base](https://huggingface.co/org/base), fine-tuned with PPO",
                     "| reward | rewards.py:score |", "| `reward_mean` | 0.100 | 0.900 |",
                     r"| metrics/good\|bad | - | 2.000 |",
                     r"| &lt;b&gt;hi&lt;/b&gt; | a\|b | \[x\]\(y\) (0.50) |",
                     "![Reward and KL over the steps of the training](curve.svg)",
                     'name = "tester/tamed"', "ppocli train model.path=org/base",
                     "Versions: torch 2.6.0."):
            assert line in text
        assert "/secret/place" not in text

    def test_settings_that_a_resume_changed_are_named(self, tmp_path):
        assert "need not give" not in card_of(facts_of(run_record(tmp_path)))
        (tmp_path / "tamed").mkdir()
        change = {"step": 1, "key": "ppo.optimizer.lr", "before": "0.001", "after": "<b>"}
        (tmp_path / "tamed/run.json").write_text(json.dumps({"run_id": "a", "changes": [change]}))
        text = card_of(facts_of(run_record(tmp_path)))
        assert ("so it need not give the\nsame numbers:\n\n"
                "- `ppo.optimizer.lr`: 0.001 until step 1, then &lt;b&gt;\n") in text

    def test_a_card_of_another_hand_is_kept_whole(self):
        assert user_text("---\nlicense: mit\n---\n# My model\n\nwords") == "# My model\n\nwords"
        assert user_text("just words") == "just words"
        assert user_text("---\nlicense: [\n---\nwords") == "words"


class TestBase:
    def test_license_of_a_folder(self, tmp_path):
        (tmp_path / "config.json").write_text('{"license": "bsd-3-clause"}')
        assert license_of(str(tmp_path), None, network=False) == {"license": "bsd-3-clause"}
        (tmp_path / "README.md").write_text("---\nlicense: other\nlicense_name: mine\n---\n")
        assert license_of(str(tmp_path), None, network=False) == {
            "license": "other", "license_name": "mine"}

    @pytest.mark.parametrize(("path", "found"), [
        ("./gone", {}), ("org/never-cached", {}), ("builtin:reviews", {"license": "apache-2.0"})])
    def test_what_is_known_without_files(self, path, found):
        assert license_of(path, None, network=False) == found


@pytest.fixture
def folders(tmp_path) -> tuple[Path, Path]:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    return tmp_path / "a", tmp_path / "b"


class TestWeights:
    def test_sizes(self):
        for text, size in (("5GB", 5 * 10**9), ("500kb", 500_000), ("1.5 MB", 1_500_000),
                           ("2TB", 2 * 10**12)):
            assert parse_size(text) == size
        for text in ("", "5", "GB", "-1GB", "0MB", "5 apples", "nanGB"):
            with pytest.raises(ConfigError, match="is no size"):
                parse_size(text)

    def test_whole_numbers_are_never_cast(self, folders):
        source, target = folders
        save_file({"ids": torch.arange(3), "w": torch.ones(2, dtype=torch.bfloat16),
                   "v": torch.ones(2)}, source / "model.safetensors")
        tensors = stored_tensors(source)
        assert dtype_of(tensors) == "bf16+fp32"
        write_weights(source, tensors, plan_files(tensors, "fp16", 10**9), "fp16", target, free)
        found = load_file(target / "model.safetensors")
        assert {name: t.dtype for name, t in found.items()} == {
            "ids": torch.int64, "w": torch.float16, "v": torch.float16}

    def test_what_fp16_cannot_hold_is_refused(self, tmp_path):
        save_file({"w": torch.tensor([1.0, 7e4])}, tmp_path / "model.safetensors")
        tensors = stored_tensors(tmp_path)
        with pytest.raises(CheckpointError, match=r"w holds values up to 7e\+04, which fp16 can't"):
            write_weights(tmp_path, tensors, plan_files(tensors, "fp16", 10**9), "fp16",
                          tmp_path, free)

    @pytest.mark.parametrize(("change", "said"), [
        (lambda t: t.pop("w"), "w is missing"),
        (lambda t: t.update(extra=torch.zeros(1)), "extra is not in the source"),
        (lambda t: t.update(w=torch.zeros(3, 2)), r"w is torch.float32 \[3, 2\], not "),
        (lambda t: t["w"].view(-1)[5:].fill_(1e-45), "the values of w differ"),
        (lambda t: t["w"].view(-1)[5:].fill_(-0.0), "the values of w differ")])
    def test_every_difference_is_found(self, folders, change, said):
        source, target = folders
        weights = {"w": torch.zeros(2, 3), "v": torch.ones(2)}
        save_file(weights, source / "model.safetensors")
        change(weights)
        save_file(weights, target / "model.safetensors")
        with pytest.raises(CheckpointError, match=said):
            compare_weights(source, stored_tensors(source), None, target, free)

    def test_pickles_and_damage_are_refused(self, tmp_path):
        (tmp_path / "pytorch_model.bin").write_bytes(b"x")
        with pytest.raises(InputError, match="are not safetensors"):
            stored_tensors(tmp_path)
        (tmp_path / "model.safetensors").write_bytes(b"\x08\0\0\0\0\0\0\0{")
        with pytest.raises(InputError, match="can't be read"):
            stored_tensors(tmp_path)


class TestVerify:
    def test_another_tokenizer_is_noticed(self):
        compare_tokenizers(make_tokenizer(), make_tokenizer(), ["the film"])
        with pytest.raises(CheckpointError, match="other special tokens"):
            compare_tokenizers(make_tokenizer(), make_tokenizer(bos=True), ["the film"])
        other = make_tokenizer()
        other.chat_template = "{{ messages }}"
        with pytest.raises(CheckpointError, match="chat template"):
            compare_tokenizers(make_tokenizer(), other, ["the film"])


class TestNames:
    @pytest.mark.parametrize(("name", "repo"), [
        ("quick", "quick"), ("my run/1", "my-run-1"), ("a--b..c", "a-b.c"), ("x.git", "x"),
        ("-.-", "ppocli-model"), ("ä", "ppocli-model"), ("n" * 200, "n" * 96)])
    def test_repository_names(self, name, repo):
        assert repo_name(name) == repo
        validate_repo_id(repo)

    def test_what_is_no_repository(self, tmp_path, monkeypatch):
        monkeypatch.chdir(tmp_path)
        (tmp_path / "user" / "name").mkdir(parents=True)
        for given in ("./x", "/tmp/x", "~/x", "../x", "user/name"):
            with pytest.raises(ConfigError, match="is a path"):
                check_repo_id(given)
        with pytest.raises(ConfigError, match="is no name of a repository"):
            check_repo_id("a/b/c")
        check_repo_id("user/other")


def test_a_decoder_whose_configuration_names_no_start_is_compared_too():
    """T5's has no such field where generation_config.json alone names it."""
    lm = make_lm("t5").eval()
    (wanted,) = logits_of(lm, [[3, 4, 5]])
    del lm.config.decoder_start_token_id
    (found,) = logits_of(lm, [[3, 4, 5]])
    assert torch.equal(found, wanted)
