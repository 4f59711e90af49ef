"""What ppocli's adapter modules use inside other libraries: there in the installed versions, and
missed in one sentence where it isn't."""

import dataclasses
import subprocess
import sys

import peft
import torch
from helpers import environment, make_lm, save_lm
from safetensors.torch import load_file, save_file

from ppocli.config.schema import ModelConfig
from ppocli.config.tasks import peft_fields
from ppocli.distributed import onednn
from ppocli.models.loading import load_adapters
from ppocli.models.loading.language_model import load_lm


def test_torch_without_its_operators_is_told(monkeypatch):
    monkeypatch.setattr(onednn, "packed", lambda _: torch.ops.mkldnn.nowhere)
    onednn.probe.cache_clear()
    assert "its operator fails here" in (onednn.probe() or "")
    onednn.probe.cache_clear()


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


SHARDED = """
import os, torch
os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="0", RANK="0", WORLD_SIZE="1",
                  LOCAL_RANK="0", DS_ACCELERATOR="cpu")
from ppocli.distributed import deepspeed_internals as ours
ours.silence_deprecations()
ours.skip_compiled_kernel()
import deepspeed
torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0,
                                     world_size=1)
deepspeed.init_distributed("gloo")
parameters = [torch.nn.Parameter(torch.arange(float(n))) for n in (3, 5)]
ours.shard(parameters, {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 3}})
for one, count in zip(parameters, (3, 5)):
    assert [name for name in ("ds_active_sub_modules", "partition", "partition_numel",
                                 "convert_to_zero_parameters") if not hasattr(one, name)] == []
    assert ours.is_sharded(one) and not ours.is_whole(one)
    assert ours.whole_shape(one) == (count,)
    assert ours.local_part(one)[:count].tolist() == list(map(float, range(count)))
with deepspeed.zero.GatheredParameters(parameters), ours.marked_in_use(parameters):
    ours.put_back(parameters)
    assert all(map(ours.is_whole, parameters)), "in use"
print("as expected")
os._exit(0)
"""


def test_deepspeed_marks_what_it_shards_as_we_say():
    done = subprocess.run([sys.executable, "-c", SHARDED], capture_output=True, text=True,
                          env=environment(), timeout=300, check=False)
    assert "as expected" in done.stdout, done.stderr


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
