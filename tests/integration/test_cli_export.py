"""``ppocli export``: what comes out, that it is the policy, what is refused, and ``--to-hub`` with
a Hub of our own."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import yaml
from helpers import environment, jsonl, read_json, save_lm, save_talker, write_jsonl
from hub_double import TOKEN, HubDouble
from huggingface_hub import ModelCard
from runs import PLANTED, STEPS, Command, Ended
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer
from warm import begin

LAST = f"step-{STEPS:06d}"
FILES = {"README.md", "config.json", "export.json", "generation_config.json",
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
    assert names(folder) == FILES
    assert names(folder.parent) == {LAST}
    ours, theirs = (load_file(place / "model.safetensors")
                    for place in (folder, finished / "model"))
    assert set(ours) == set(theirs)
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    assert (folder / "generation_config.json").read_bytes() == (
        finished / "model/generation_config.json").read_bytes()
    script = here / "script.py"
    script.write_text(WITHOUT_PPOCLI)
    alone = begin([str(script), str(folder), str(finished / "model")], cwd=here, env=environment())
    out, err = alone.communicate(timeout=120)
    assert (alone.returncode, out) == (0, "2 []\n"), err
    # what the card tells
    text = (folder / "README.md").read_text()
    summary = read_json(finished / "summary.json")
    before, after = (summary[name]["reward_mean"] for name in ("eval_before", "eval_after"))
    for card in (text, (finished / "model/README.md").read_text()):
        assert f"| `reward_mean` | {before:.3f} | {after:.3f} |" in card
    assert "ppo.num_steps=4" in text
    assert f"torch {torch.__version__}".split("+")[0] in text
    assert ModelCard(text).data.eval_results[0].metric_value == after
    assert "base_model" not in text.split("---")[1]  # the base is a folder, which no one else has
    config = yaml.safe_load((folder / "training_config.yaml").read_text())
    assert config["ppo"]["num_rollouts"] == 12
    # whoever loads what a run saved has transformers' attention and activations alone
    for path in (*finished.rglob("config.json"), folder / "config.json"):
        config = read_json(path)
        assert not any("attn_implementation" in name for name in config), path
        assert config["activation_function"] == "gelu_new", path


@pytest.mark.slow
def test_best_step_and_checkpoint(finished, export):
    best = read_json(finished / "summary.json")["best"]["step"]
    folder = finished / "export" / f"step-{best:06d}"
    assert export("mine", "--best").out == f"{folder}\n"
    assert read_json(folder / "export.json")["step"] == best
    assert export("mine", "--step", 1).out.endswith("export/step-000001\n")
    assert "There was no evaluation at step 1." in (
        finished / "export/step-000001/README.md").read_text()
    assert export(finished / "checkpoints/step-000003").out.endswith("export/step-000003\n")
    assert export("mine", "--step", 77).code == 5


def test_a_cast_is_torchs_own(finished, export, here):
    result = json.loads(export(finished, "--dtype", "bf16", "-o", "out", "--json", code=0).out)
    folder = here / "out"
    assert (result["folder"], result["dtype"], result["step"]) == (str(folder), "bf16", STEPS)
    assert 0 < result["logits_difference"] < 0.1
    assert str(finished) not in (folder / "export.json").read_text()
    model, info = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not info["missing_keys"]
    source = AutoModelForCausalLM.from_pretrained(finished / "model").to(torch.bfloat16)
    for name, weight in source.state_dict().items():
        assert torch.equal(model.state_dict()[name], weight), name
    back = export("out", "--dtype", "fp32", "-o", "back", "--json", code=0)
    assert json.loads(back.out)["logits_difference"] == 0  # what bf16 holds, fp32 holds exactly


def test_what_differs_is_not_published(here, export, inject):
    lm = AutoModelForCausalLM.from_pretrained(save_lm(here / "lm"))
    lm.get_output_embeddings().weight.data[0, 0] = 7e4
    lm.save_pretrained(here / "lm")
    done = export("./lm", "--dtype", "fp16", "-o", "half", code=5)
    assert "The export differs from its source: logits are off by" in done.err
    assert "fix:   --dtype bf16 has the range of fp32" in done.err
    inject("export.before_verify:term")
    assert "Stopped: stopped by SIG" in export("./lm", "-o", "stopped", code=143).err
    assert names(here) == {"lm"}


def test_a_bare_model_folder(here, export):
    lm = save_talker(here / "lm", tie_word_embeddings=True)
    tokenizer = AutoTokenizer.from_pretrained(lm)
    tokenizer.chat_template = {"default": tokenizer.chat_template, "tool_use": "{{ tools }}"}
    tokenizer.save_pretrained(lm)
    (lm / "generation_config.json").unlink()
    assert "--output DIR" in export("./lm", code=2).err
    assert export("./lm", "--dtype", "fp16", "--output", "half", code=0).out == f"{here}/half\n"
    assert names(here / "half") == FILES - {"training_config.yaml"} | {
        "chat_template.jinja", "additional_chat_templates"}
    assert read_json(here / "half/config.json")["dtype"] == "float16"
    assert AutoTokenizer.from_pretrained(here / "half").chat_template == tokenizer.chat_template
    assert "apply_chat_template" in (here / "half/README.md").read_text()
    (here / "half/additional_chat_templates/mine.jinja").write_text("{{ mine }}")
    assert "(additional_chat_templates/mine.jinja)" in export(
        "./lm", "-o", "half", "--overwrite", code=2).err


def test_nothing_is_overwritten_unasked(finished, export):
    folder = finished / "export" / LAST
    assert export("mine").code == 0
    assert f"runs/mine/export/{LAST} holds an export already." in export("mine", code=2).err
    assert export("mine", "--overwrite", "--dtype", "bf16").code == 0
    assert read_json(folder / "export.json")["dtype"] == "bf16"
    (folder / "notes.txt").write_text("mine")
    assert "(notes.txt)" in export("mine", "--overwrite", code=2).err
    for place in (".", "runs/mine/model"):
        export("mine", "--overwrite", "-o", place, code=2)
    assert (finished / "model/model.safetensors").is_file()


def test_a_dry_run_says_what_would_be_done_and_writes_nothing(finished, export, here):
    def state() -> list[tuple[str, int]]:
        return [(str(p), p.lstat().st_mtime_ns) for p in sorted(here.rglob("*"))]

    old = state()
    assert export("mine", "--dry-run", "--to-hub", "me/x", "--public", code=0).out == (
        f"would export:  runs/mine, step {STEPS} to runs/mine/export/{LAST}\n"
        "would push to: me/x (public)\nNothing was written (--dry-run).\n")
    assert state() == old


def test_no_secret_and_no_home_leave_the_machine(finished, export, here, monkeypatch):
    """Planted everywhere a user could have left it by accident."""
    secret = "correct-horse-battery"
    monkeypatch.setenv("HF_TOKEN", PLANTED)
    monkeypatch.setenv("MY_SERVICE_PASSWORD", secret)
    monkeypatch.setenv("HOME", str(here))
    config = yaml.safe_load((finished / "config.yaml").read_text())
    config["reward"]["kwargs"] = {"url": f"https://me:{secret}@host", "other": PLANTED[:-1]}
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
    config = yaml.safe_load((folder / "training_config.yaml").read_text())
    assert config["reward"]["kwargs"] == {"url": "https://me:***@host", "other": "***"}
    assert config["output_dir"] == "~/runs"


@pytest.mark.parametrize(("words", "code", "message"), [
    (["--best", "--step", "2"], 2, "--best and --step name two checkpoints."),
    (["--adapter"], 2, "step 4 is a whole model: --merge needs an adapter"),
    (["./nowhere"], 3, "./nowhere does not exist")])
def test_what_cannot_be_meant_is_refused(here, export, reference, words, code, message):
    words = words if "./nowhere" in words else [str(reference), *words]
    assert message in export(*words, "-o", "x", code=code).err
    assert list(here.iterdir()) == []


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[HubDouble]:
    """A Hub that this process talks to."""
    with HubDouble() as double:
        monkeypatch.setenv("HF_ENDPOINT", double.url)
        monkeypatch.setenv("HF_TOKEN", TOKEN)
        for name, value in {"ENDPOINT": double.url, "HF_HUB_OFFLINE": False,
                            "HF_HUB_DISABLE_XET": True}.items():
            monkeypatch.setattr(f"huggingface_hub.constants.{name}", value)
        yield double


@pytest.fixture
def push(export: Command, hub: HubDouble, here: Path) -> Command:
    """``ppocli export ./lm -o out --to-hub``, or of ``./out`` once it is there; no token may be
    shown, whatever happens."""
    save_lm(here / "lm")

    def command(*words: str, code: int | None = None) -> Ended:
        source = ("./out",) if (here / "out").exists() else ("./lm", "-o", "out")
        done = export(*source, "--to-hub", *words, code=code)
        assert TOKEN not in done.said
        return done

    return command


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


# a command shows no warnings of libraries, and here they are errors
@pytest.mark.filterwarnings("ignore:Use 'content:DeprecationWarning")
def test_export_and_push_in_one_go_and_again(hub, push, here):
    """Private by default, under the token's user; the weights go by LFS; every byte arrives."""
    done = push("tiny", code=0)
    assert done.out == f"{hub.url}/tester/tiny\n"
    repo = hub.repos["tester/tiny"]
    assert repo.private
    assert repo.branches["main"] == contents(here / "out")
    assert repo.lfs == {"model.safetensors"}
    card = here / "out/README.md"
    assert 'name = "tester/tiny"' in card.read_text()
    # stale weights go, others' files stay, and only what was exported is pushed
    repo.branches["main"] |= {"model-00007-of-00009.safetensors": b"stale", "adapter.safetensors":
                              b"someone's", "adapter_config.json": b"{}", "base_model.json": b"{}",
                              "adapter_model.safetensors": b"that was merged"}
    (here / "out/private-notes.txt").write_text("not for the Hub")
    card.write_text("---\nlicense: mit\n---\nMy own card.\n")
    assert push("tester/tiny", code=0).out == f"{hub.url}/tester/tiny\n"
    files = repo.branches["main"]
    assert files.pop("adapter.safetensors") == b"someone's"
    assert files.keys() == names(here / "out") - {"private-notes.txt"}
    assert files["README.md"] == b"---\nlicense: mit\n---\nMy own card.\n"
    # a push that fails leaves the export, and its message names the command to repeat
    repo.private = False
    failed = push("tester/tiny", code=9)
    assert "the repository is public" in failed.err
    assert "Your export is complete in out." in failed.err
    assert "add --public" in failed.err
