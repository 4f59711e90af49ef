"""What ppocli's adapter modules use inside other libraries: there in the installed versions, and
missed in one sentence where it isn't."""

import dataclasses

import peft
import pytest
import torch
from helpers import make_lm, save_lm
from safetensors.torch import load_file, save_file

from ppocli.config.schema import ModelConfig
from ppocli.config.tasks import peft_fields
from ppocli.models.loading import load_adapters
from ppocli.models.loading.language_model import load_lm
from ppocli.models.transformers_internals import fuse_layers


def test_the_table_of_peft_s_fields_is_the_installed_one_s():
    filled_in = {"task_type", "peft_type", "auto_mapping", "peft_version", "inference_mode",
                 "base_model_name_or_path", "revision", "layer_replication"}
    theirs = {field.name for field in dataclasses.fields(peft.LoraConfig)
              if "Config" not in str(field.type)} - filled_in
    assert set(peft_fields()) == theirs


def test_peft_s_wrappers_switch_off_and_name_weights_as_we_say():
    lm = make_lm().eval()
    bare, ids = set(lm.state_dict()), torch.arange(6)[None]
    before = lm(input_ids=ids).logits
    load_adapters._wrap(lm, peft.LoraConfig(task_type="CAUSAL_LM", init_lora_weights=False,
                                            modules_to_save=["ln_f"]))
    trains = {name for name, p in lm.named_parameters() if p.requires_grad}
    assert trains == {name for name, _ in lm.named_parameters()
                      if load_adapters.belongs_to_adapter(name)}
    assert {load_adapters.bare_name(name) for name in lm.state_dict()
            if not load_adapters.belongs_to_adapter(name)} == bare
    assert not torch.allclose(lm(input_ids=ids).logits, before)
    load_adapters.enable_adapter(lm, False)
    assert torch.equal(lm(input_ids=ids).logits, before)
    assert {name for name, p in lm.named_parameters() if p.requires_grad} == trains


def test_weights_lie_where_torch_puts_them_wherever_they_lay_in_their_file(tmp_path):
    """MKL rounds by the place of its operands; a longer header moves all tensors of a file."""
    save_lm(tmp_path / "lm", "gpt2")
    file = tmp_path / "lm/model.safetensors"
    tensors = load_file(file)
    for note in ("", "x", "x" * 13, "x" * 29):
        save_file(tensors, file, metadata={"format": "pt", "note": note})
        lm = load_lm(ModelConfig(path=str(tmp_path / "lm"))).lm
        assert all(p.data_ptr() % 64 == 0 for p in lm.parameters())
        assert lm.get_output_embeddings().weight is lm.get_input_embeddings().weight


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize(("kind", "fused"), [("qwen2", True), ("qwen3", True), ("gemma2", False)])
def test_norms_through_torch_s_function_make_the_numbers_of_the_model_s_own_code(kind, fused,
                                                                                precision):
    """To the last bit on a CPU, gradients too; a norm of other arithmetic is left as it is."""
    lm, ids = make_lm(kind), torch.arange(24).reshape(2, 12)
    norm = type(lm.model.norm)
    found = []
    for _ in range(2):
        lm.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16"):
            out = lm(input_ids=ids).logits
        out.float().square().mean().backward()
        found.append([out.detach(), *(p.grad.clone() for p in lm.parameters())])
        fuse_layers(lm)
    assert (type(lm.model.norm) is not norm) == fused
    assert isinstance(lm.model.norm, norm)
    assert all(torch.equal(*pair) for pair in zip(*found, strict=True))
