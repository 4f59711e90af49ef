"""``ppocli export`` on this disk: what comes out, that it is the policy, and what is refused."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml
from helpers import environment, jsonl, read_json, save_lm, write_jsonl
from huggingface_hub import ModelCard
from runs import PLANTED, STEPS, run
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

import ppocli
from ppocli.config.schema import ModelConfig
from ppocli.errors import InputError
from ppocli.export.card import user_text, with_user_text
from ppocli.models.loading.language_model import load_lm

LAST = f"step-{STEPS:06d}"
FILES = {"README.md", "config.json", "curve.svg", "export.json", "generation_config.json",
         "model.safetensors", "tokenizer.json", "tokenizer_config.json", "training_config.yaml"}
WITHOUT_PPOCLI = '''\
import sys

sys.modules["ppocli"] = None  # importing it fails
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

export, policy = sys.argv[1:]
tokenizer = AutoTokenizer.from_pretrained(export)
inputs = tokenizer(["the film", "i saw a"], return_tensors="pt", padding=True)
models = [AutoModelForCausalLM.from_pretrained(folder) for folder in (export, policy)]
with torch.no_grad():
    ours, theirs = (model(**inputs).logits for model in models)
assert torch.equal(ours, theirs)
assert not torch.equal(ours, torch.zeros_like(ours))
print(models[0].generate(**inputs).shape[0], [n for n in sys.modules if n.startswith("ppocli.")])
'''


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def test_a_finished_run_becomes_a_folder_that_needs_no_ppocli(finished, export, here):
    done = export("mine", code=0)
    folder = finished / "export" / LAST
    assert done.out == f"{folder}\n"
    assert "Verified: reloaded with transformers" in done.err
    assert "logits on 2 prompts equal, tokenizer equal." in done.err
    assert names(folder) == FILES
    assert names(folder.parent) == {LAST}
    ours, theirs = (load_file(place / "model.safetensors")
                    for place in (folder, finished / "model"))
    assert set(ours) == set(theirs)
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    own = read_json(finished / "model/generation_config.json")
    assert read_json(folder / "generation_config.json") == own
    script = here / "script.py"
    script.write_text(WITHOUT_PPOCLI)
    alone = subprocess.run(
        [sys.executable, "-I", str(script), str(folder), str(finished / "model")], text=True,
        capture_output=True, env=environment(), timeout=120, check=False)
    assert (alone.returncode, alone.stdout) == (0, "2 []\n"), alone.stderr
    # what the card tells
    text = (folder / "README.md").read_text()
    summary = read_json(finished / "summary.json")
    before, after = (summary[name]["reward_mean"] for name in ("eval_before", "eval_after"))
    assert f"| `reward_mean` | {before:.3f} | {after:.3f} |" in text
    assert "ppo.num_steps=4" in text
    assert f"torch {torch.__version__}".split("+")[0] in text
    metrics = ModelCard(text).data.eval_results
    assert metrics[0].metric_value == after
    assert "base_model" not in text.split("---")[1]  # the base is a folder, which no one else has
    config = yaml.safe_load((folder / "training_config.yaml").read_text())
    assert config["ppo"]["num_rollouts"] == 12


def test_best_step_and_checkpoint(finished, export):
    best = read_json(finished / "summary.json")["best"]["step"]
    folder = finished / "export" / f"step-{best:06d}"
    assert export("mine", "--best").out == f"{folder}\n"
    assert read_json(folder / "export.json")["step"] == best
    done = export("mine", "--step", 1)
    assert done.out.endswith("export/step-000001\n")
    assert "There was no evaluation at step 1." in (
        finished / "export/step-000001/README.md").read_text()
    assert export(finished / "checkpoints/step-000003").out.endswith("export/step-000003\n")
    assert export("mine", "--step", 77).code == 5
    shutil.rmtree(finished / "checkpoints" / LAST)
    done = export("mine", "--include-value-head", "-o", "x", code=3)
    assert "is gone: its checkpoint is not there any more" in done.err


def test_casts_shards_and_the_value_head(finished, export, here):
    done = export(finished, "--dtype", "bf16", "--max-shard-size", "20KB", "--include-value-head",
                  "-o", "out", "--json")
    told = json.loads(done.out)
    folder = here / "out"
    assert (told["folder"], told["dtype"], told["step"]) == (str(folder), "bf16", STEPS)
    assert set(told["files"]) == names(folder)
    assert len([name for name in told["files"] if name.startswith("model-0")]) > 2
    assert 0 < told["verified"]["logits"] <= told["verified"]["allowed"] < 0.1
    assert str(finished) not in (folder / "export.json").read_text()
    head = finished / "checkpoints" / LAST / "value_head.safetensors"
    assert (folder / "value_head.safetensors").read_bytes() == head.read_bytes()
    assert "`value_head.safetensors` is the critic" in (folder / "README.md").read_text()
    model, info = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert model.dtype == torch.bfloat16
    assert not info["missing_keys"]
    # and back: what bf16 holds, fp32 holds exactly
    assert "prompts equal" in export("out", "--dtype", "fp32", "-o", "back").err


def test_without_matplotlib_an_export_has_no_curve_and_says_so(finished, export, here, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    done = export(str(finished), "-o", "plain", code=0)
    assert "no curve.svg: it needs matplotlib, which is not installed: pip install" in done.err
    assert names(here / "plain") == FILES - {"curve.svg"}
    assert "curve.svg" not in (here / "plain/README.md").read_text()


def test_a_bare_model_folder(here, export):
    lm = save_lm(here / "lm", "llama", tie_word_embeddings=True)
    (lm / "generation_config.json").unlink()
    (lm / "README.md").write_text("---\nlicense: mit\n---\n")
    assert export("./lm", code=2).err == (
        "Error: ./lm belongs to no run: where should the export go?\n"
        "  where: --output\n  fix:   --output DIR\n")
    assert export("./lm", "--dtype", "fp16", "--output", "half", code=0).out == f"{here}/half\n"
    assert names(here / "half") == FILES - {"curve.svg", "training_config.yaml"}
    told = read_json(here / "half/config.json")
    (here / "half/config.json").write_text(json.dumps({**told, "dtype": "float32"}))
    export("./half", "-o", "again", code=0)  # as models are whose weights were cast by hand
    assert read_json(here / "again/config.json")["dtype"] == "float16"
    assert export("./lm", "--include-value-head", "-o", "x", code=3).err.startswith(
        "Error: ./lm has no value head: only the checkpoints of a run have one.\n")
    assert not (here / "x").exists()


def test_own_code_of_a_bare_model_runs_where_it_is_trusted(here, export):
    lm = save_lm(here / "lm", "llama")
    (lm / "own.py").write_text("from transformers import LlamaConfig, LlamaForCausalLM as Llama\n"
                               "class Config(LlamaConfig):\n    model_type = 'own'\n"
                               "class LM(Llama):\n    config_class = Config\n")
    told = read_json(lm / "config.json")
    (lm / "config.json").write_text(json.dumps({**told, "model_type": "own", "auto_map": {
        "AutoConfig": "own.Config", "AutoModelForCausalLM": "own.LM"}}))
    with pytest.raises(InputError) as refused:
        load_lm(ModelConfig(path=str(lm)))
    assert refused.value.fix == "if you trust that code: model.trust_remote_code=true"
    for _ in range(2):
        assert "fix:   if you trust that code: --trust" in export("./lm", "-o", "x", code=3).err
        (lm / "generation_config.json").unlink(missing_ok=True)
    assert export("./lm", "-o", "x", "--trust").code == 0


def test_nothing_is_overwritten_unasked(finished, export, here):
    folder = finished / "export" / LAST
    assert export("mine").code == 0
    assert export("mine", code=2).err == (
        f"Error: runs/mine/export/{LAST} holds an export already.\n  where: --output\n"
        "  fix:   add --overwrite, or name another folder: --output DIR\n")
    again = export("mine", "--to-hub", "--repo-id", "me/x", "--public", "--revision", "b1", code=2)
    assert again.err.endswith(
        f"to push the one that is there: ppocli export runs/mine/export/{LAST} --to-hub "
        "--repo-id me/x --public --revision b1\n")
    card = folder / "README.md"
    card.write_text(with_user_text(card.read_text(), "My own words."))
    assert export("mine", "--overwrite", "--dtype", "bf16").code == 0
    assert user_text(card.read_text()) == "My own words."
    assert "stored as bf16" in card.read_text()
    (folder / "notes.txt").write_text("mine")
    assert "would be lost (notes.txt)" in export("mine", "--overwrite", code=2).err
    for place in (".", "runs/mine", "runs/mine/model", "runs/mine/config.yaml"):
        export("mine", "--overwrite", "-o", place, code=2)
    assert (finished / "model/model.safetensors").is_file()
    (here / "empty").mkdir()
    assert export("mine", "-o", "empty").code == 0


def test_a_dry_run_says_everything_and_writes_nothing(finished, here):
    def state() -> list[tuple[str, int]]:
        return [(str(p), p.lstat().st_mtime_ns) for p in sorted(here.rglob("*"))]

    old = state()
    done = run("export", "mine", "--dry-run", "--to-hub", "--public", "--create-pr", "--dtype",
               "bf16", cwd=here, HF_ENDPOINT="http://127.0.0.1:9", HF_HUB_OFFLINE="0",
               HF_TOKEN=PLANTED, code=0)
    assert done.err == ""
    assert state() == old
    assert done.out.splitlines()[:2] == [
        f"would export:  runs/mine, step {STEPS} (runs/mine/model)",
        f"would write:   runs/mine/export/{LAST}"]
    for part in ("fp32 cast to bf16", "training_config.yaml", "USER/mine", "(public)",
                 "as a pull request", "Nothing was written (--dry-run)."):
        assert part in done.out


@pytest.mark.parametrize(("fault", "code", "said"), [
    ("export.tensor@3:nan", 5, r"Error: The export differs from its source: the values of "
     r"transformer\.h\.0\..* differ\. Nothing was published\.$"),
    ("export.before_verify:term", 143, "Stopped: stopped by SIG")])
def test_a_difference_and_an_interruption_publish_nothing(fault, code, said, finished, export,
                                                          inject):
    inject(fault)
    assert re.search(f"^{said}", export("mine", code=code).err, re.MULTILINE)
    assert list((finished / "export").iterdir()) == []


def test_no_secret_and_no_home_leave_the_machine(finished, export, here, monkeypatch):
    """Planted everywhere a user could have left it by accident."""
    secret = "correct-horse-battery"
    monkeypatch.setenv("HF_TOKEN", PLANTED)
    monkeypatch.setenv("MY_SERVICE_PASSWORD", secret)
    monkeypatch.setenv("HOME", str(here))
    config = yaml.safe_load((finished / "config.yaml").read_text())
    config["reward"]["kwargs"] = {"url": f"https://me:{secret}@host", "other": PLANTED[:-1]}
    # while the configuration can still be evaluated
    path = ppocli.evaluate(finished, name="mine").folder / "eval.json"
    told = read_json(path) | {"note": f"{secret} {here}/x"}
    told["settings"]["reward"] = {key: config["reward"][key] for key in told["settings"]["reward"]}
    path.write_text(json.dumps(told))
    (finished / "config.yaml").write_text(yaml.safe_dump(config))
    planted = f"{secret} {PLANTED}"
    rows = [{"kind": "eval", "step": step, "prompt": planted, "response": planted}
            for step in (0, STEPS)] + jsonl(finished / "samples.jsonl")
    write_jsonl(finished / "samples.jsonl", rows)
    done = export("mine", "--json", code=0)
    folder = finished / "export" / LAST
    for text in (done.out.replace(str(folder), ""), done.err,
                 *(path.read_bytes().decode("latin-1") for path in folder.iterdir())):
        for planted in (PLANTED[:-1], secret, str(here)):
            assert planted not in text
    assert "*** ***" in (folder / "README.md").read_text().replace("\\", "")
    assert read_json(folder / "eval.json")["note"] == "*** ~/x"
    config = yaml.safe_load((folder / "training_config.yaml").read_text())
    assert config["reward"]["kwargs"] == {"url": "https://me:***@host", "other": "***"}
    assert config["output_dir"] == "~/runs"


def test_offline_is_said_at_once_after_the_export_is_complete(here, export):
    save_lm(here / "lm")
    done = export("./lm", "-o", "new", "--to-hub", "--repo-id", "me/lm", code=9)
    assert done.out == ""
    assert "Verified: " in done.err
    assert done.err.endswith(
        "\nError: The push to me/lm did not go through: HF_HUB_OFFLINE=1 forbids it. Your export "
        "is complete in ./new.\n  where: https://huggingface.co\n  fix:   env -u HF_HUB_OFFLINE "
        "ppocli export ./new --to-hub --repo-id me/lm\n")
    assert names(here / "new") == FILES - {"curve.svg", "training_config.yaml"}


@pytest.mark.parametrize(("words", "code", "said"), [
    (["--repo-id", "me/x"], 2, "--repo-id is about the Hub, and nothing is to be pushed there."),
    (["--public"], 2, "--public is about the Hub"),
    (["--to-hub", "--create-pr", "--revision", "x"], 2, "--create-pr and --revision exclude"),
    (["--to-hub", "--repo-id", "./x"], 2, "--repo-id ./x is no name of a repository: it is"),
    (["--max-shard-size", "big"], 2, "--max-shard-size big is no size."),
    (["--best", "--step", "2"], 2, "--best and --step name two checkpoints."),
    (["./nowhere"], 3, "./nowhere does not exist")])
def test_what_cannot_be_meant_is_refused(here, export, reference, words, code, said):
    if "--best" in words:
        words = [str(reference), *words]
    assert said in export(*words, code=code).err
    assert list(here.iterdir()) == []


def test_no_file_names_attention_or_activations_that_others_lack(finished, export):
    """A run computes with its own; whoever loads what it saved has transformers' alone."""
    from ppocli.models.fast.attention import NAME

    assert export("runs/mine", "-o", "out").code == 0
    configs = [*finished.rglob("config.json"), Path("out/config.json")]
    assert finished / "model/config.json" in configs
    assert len(configs) == 2 + len(list((finished / "checkpoints").glob("step-*")))
    for path in configs:
        config = read_json(path)
        assert NAME not in map(str, config.values()), path
        assert not any("attn_implementation" in name for name in config), path
        assert config["activation_function"] == "gelu_new", path
