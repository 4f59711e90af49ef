"""What a configuration may say of an adapter, told before anything is loaded."""

import pytest

from ppocli.config.problems import find_problems
from ppocli.config.schema import TrainConfig


@pytest.mark.parametrize(("changes", "what"), [
    ({"peft": {"r": 8}}, "model.peft: type is missing"),
    ({"peft": {"type": "lore"}}, "lore must be one of lora, prefix, prompt; did you mean lora?"),
    ({"peft": {"type": "lora", "lora_alfa": 8}}, "did you mean lora_alpha"),
    ({"peft": {"type": "lora", "r": "many"}}, "model.peft.r: 'many' must be of the type int"),
    ({"peft": {"type": "lora", "lora_dropout": 1.0}}, "model.peft.lora_dropout: 1.0 must be >= 0"),
    ({"peft": {"type": "lora", "init_lora_weights": "pissa"}}, "pissa must be one of true"),
    ({"peft": {"type": "lora", "inference_mode": True}}, "is filled in by ppocli"),
    ({"peft": {"type": "lora", "task_type": "SEQ_CLS"}}, "SEQ_CLS must be CAUSAL_LM or SEQ_2_SEQ"),
    ({"peft": {"type": "lora"}, "num_layers_unfrozen": 1}, "the whole base is frozen"),
    ({"peft": {"type": "prefix", "num_virtual_tokens": 4}, "gradient_checkpointing": True},
     "which gradient checkpointing doesn't use"),
    ({"quantization": "4bit"}, "4bit weights can't be trained")])
def test_what_contradicts_an_adapter_is_said_before_anything_is_loaded(changes, what):
    cfg = TrainConfig()
    for name, value in changes.items():
        setattr(cfg.model, name, value)
    assert any(what in str(problem) for problem in find_problems(cfg))


def test_dora_and_sharded_weights_do_not_go_together():
    cfg = TrainConfig()
    cfg.model.peft = {"type": "lora", "use_dora": True}
    for stage in range(4):
        cfg.hardware.zero_stage = stage
        assert any("DoRA reads the norms" in str(problem)
                   for problem in find_problems(cfg)) == (stage == 3)


@pytest.mark.parametrize("peft", [
    None, {}, {"type": "lora"}, {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": 8},
    {"type": "lora", "target_modules": ["c_attn"], "use_rslora": True},
    {"peft_type": "PREFIX_TUNING", "num_virtual_tokens": 4},
    {"type": "prompt", "num_virtual_tokens": 4, "prompt_tuning_init": "RANDOM"}])
def test_what_peft_takes_is_taken(peft):
    cfg = TrainConfig()
    cfg.model.peft = peft
    assert not [p for p in find_problems(cfg) if p.key.startswith("model.peft")]
