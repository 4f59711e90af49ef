"""A LoRA policy through the commands: trained, gone on with, judged, asked, exported."""

from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from helpers import jsonl, ppocli, read_json
from runs import assert_equal_runs, copied, resumed, run, whole_copy, words

pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is dep:FutureWarning")
LORA = ("model.peft.type=lora", "model.peft.r=4", "model.peft.target_modules=[c_attn,c_fc]",
        "model.peft.lora_dropout=0.1", "ppo.optimizer.lr=1e-2", "ppo.num_steps=2")
LAST = "step-000002"


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
    stopped = copied(trained, tmp_path / "cut", 1)
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


@pytest.mark.slow
def test_an_export_is_merged_or_an_adapter(here, trained, export):
    from peft import AutoPeftModelForCausalLM
    from transformers import AutoModelForCausalLM

    assert export("lora").code == 0
    folder = here / "runs/lora/export" / LAST
    assert not (folder / "adapter_config.json").exists()
    ours = logits(AutoPeftModelForCausalLM.from_pretrained(trained / "model"))
    merged = logits(AutoModelForCausalLM.from_pretrained(folder))
    torch.testing.assert_close(merged, ours, rtol=1e-5, atol=1e-5)

    export("lora", "--adapter", "-o", "small", code=0)
    assert torch.equal(logits(AutoPeftModelForCausalLM.from_pretrained(here / "small")), ours)


def test_it_is_judged(here):
    import ppocli

    figures = ppocli.evaluate(f"runs/lora/checkpoints/{LAST}").figures
    after = read_json(here / "runs/lora/summary.json")["eval_after"]
    assert figures["reward_mean"] == pytest.approx(after["reward_mean"])
    assert figures["kl_mean"] == pytest.approx(after["kl_mean"], abs=1e-5)
    assert abs(after["kl_mean"]) > 1e-3


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

@pytest.mark.slow
@pytest.mark.skipif(find_spec("bitsandbytes") is None, reason="bitsandbytes is not installed")
@pytest.mark.parametrize("bits", ["4bit", "8bit"])
def test_a_quantized_base_carries_policy_and_critic_and_goes_on_bit_for_bit(world, bits):
    from safetensors.torch import load_file

    run("train", *words(*LORA[:3], "ppo.num_steps=2", "ppo.optimizer.lr=1e-2",
                        "model.value.kind=adapter", f"model.quantization={bits}",
                        "run_name=small"), cwd=world, code=0)
    folder = world / "runs/small"
    before, *rest = jsonl(folder / "metrics.jsonl")
    assert abs(before["eval/kl_mean"]) < 1e-5  # the reference is the same base without the adapter
    assert all(row["val/var_explained"] is not None for row in rest if "loss/value" in row)
    adapters = load_file(folder / "model/adapter_model.safetensors")
    assert any(tensor.abs().sum() > 0 for name, tensor in adapters.items() if "lora_B" in name)
    stopped = copied(folder, world / "cut", 1)
    resumed(stopped)
    assert_equal_runs(folder, stopped)
