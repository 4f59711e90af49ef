"""A LoRA policy through the commands: trained, gone on with, judged, asked, exported."""

from pathlib import Path

import pytest
import torch
from helpers import ppocli, read_json
from runs import assert_equal_runs, copied, resumed, run, whole_copy, words

pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is dep:FutureWarning")
LORA = ("model.peft.type=lora", "model.peft.r=4", "model.peft.target_modules=[c_attn,c_fc]",
        "model.peft.lora_dropout=0.1", "ppo.optimizer.lr=1e-2")
LAST = "step-000004"


@pytest.fixture(scope="module")
def trained(shared_world: Path) -> Path:
    """The folder of a finished run, made by the command."""
    run("train", *words(*LORA, "run_name=lora"), cwd=shared_world, code=0)
    return shared_world / "runs/lora"


@pytest.fixture
def here(trained: Path, world: Path) -> Path:
    """The current folder, with a copy of the run in it; its base stays where it was."""
    (world / "runs").mkdir()
    whole_copy(trained, world / "runs/lora")
    return world


def logits(model) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(input_ids=torch.tensor([[4, 5, 6, 7]])).logits


def test_it_stops_and_goes_on_bit_for_bit(trained, tmp_path):
    stopped = copied(trained, tmp_path / "cut", 2)
    resumed(stopped)
    assert_equal_runs(trained, stopped)


def test_model_and_checkpoints_are_folders_that_peft_loads(trained, shared_world):
    from peft import AutoPeftModelForCausalLM
    from transformers import AutoModelForCausalLM

    base = logits(AutoModelForCausalLM.from_pretrained(shared_world / "lm"))
    for folder in (trained / "model", trained / "checkpoints/latest/policy"):
        assert not list(folder.glob("model*.safetensors"))
        assert (logits(AutoPeftModelForCausalLM.from_pretrained(folder)) - base).abs().max() > 1e-3
    named = read_json(trained / "model/base_model.json")
    assert named["path"] == str(shared_world / "lm")
    assert "library_name: peft" in (trained / "model/README.md").read_text()


def test_an_export_is_merged_or_an_adapter(here, trained, export):
    from peft import AutoPeftModelForCausalLM
    from transformers import AutoModelForCausalLM

    assert export("lora", "--dry-run").code == 0
    assert not (here / "runs/lora/export").exists()
    assert export("lora").code == 0
    folder = here / "runs/lora/export" / LAST
    assert sorted(p.name for p in folder.parent.iterdir()) == [LAST]
    assert not (folder / "adapter_config.json").exists()
    ours = logits(AutoPeftModelForCausalLM.from_pretrained(trained / "model"))
    merged = logits(AutoModelForCausalLM.from_pretrained(folder))
    torch.testing.assert_close(merged, ours, rtol=1e-5, atol=1e-5)
    assert "from transformers import AutoModelForCausalLM" in (folder / "README.md").read_text()

    export("lora", "--adapter", "-o", "small", code=0)
    assert torch.equal(logits(AutoPeftModelForCausalLM.from_pretrained(here / "small")), ours)
    card = (here / "small/README.md").read_text()
    assert "from peft import AutoPeftModelForCausalLM" in card
    loaded = {}
    exec(card.partition("```python\n")[2].partition("```")[0].replace(
        "name =", f"name = {str(here / 'small')!r} #"), loaded)
    assert loaded["model"].base_model.model.generation_config.max_new_tokens == 8
    refused = export("lora", "--adapter", "--dtype", "bf16", "-o", "x", code=2)
    assert "is an adapter (LORA): " in refused.err
    assert "lm is a whole model: " in export("lm", "--merge", "-o", "y").err
    assert export("small", "--merge", "-o", "again").code == 0
    assert torch.equal(logits(AutoModelForCausalLM.from_pretrained(here / "again")), merged)


@pytest.mark.parametrize("what", ["checkpoint", "exported"])
def test_it_is_judged_and_asked(here, export, what):
    import ppocli

    target, words = f"runs/lora/checkpoints/{LAST}", []
    if what == "exported":
        target = "small"
        assert export("lora", "--adapter", "-o", "small").code == 0
        words = ["prompts.path=prompts.jsonl", "reward.fn=rewards.py:plain",
                 "prompts.eval.limit=4", "generation.max_new_tokens=8"]
    figures = ppocli.evaluate(target, words).figures
    after = read_json(here / "runs/lora/summary.json")["eval_after"]
    assert figures["reward_mean"] == pytest.approx(after["reward_mean"])
    assert figures["kl_mean"] == pytest.approx(after["kl_mean"], abs=1e-5)
    assert after["kl_mean"] > 1e-3


@pytest.mark.slow
def test_what_lies_in_the_current_folder_stands_for_no_library(world):
    for name in ("datasets", "accelerate", "yaml"):
        (world / f"{name}.py").write_text("raise SystemExit('shadowed')")
    for name in ("deepspeed", "torch", "transformers", "numpy"):
        (world / name).mkdir()
        (world / name / "__init__.py").write_text("raise SystemExit('shadowed')")
    for name in ("wandb", "peft", "safetensors"):
        (world / name).mkdir()
    ppocli("train", *words(*LORA, "run_name=lora", "ppo.num_steps=1"), cwd=world, code=0)
