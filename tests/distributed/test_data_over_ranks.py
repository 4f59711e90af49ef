"""``ppocli sft`` and ``ppocli reward-model`` on two ranks and under ZeRO: one process's numbers."""

from pathlib import Path

import pytest
from helpers import WORDS, save_lm, write_jsonl
from ranks import largest_difference, run_job, under
from safetensors.torch import load_file

SCRIPT = Path(__file__).with_name("data_updates.py")
LORA = {"type": "lora", "r": 4, "target_modules": ["c_attn", "c_fc"]}
pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="module")
def config(tmp_path_factory) -> dict:
    """Counts that don't divide: 9 rows, updates of 5, passes of 2, 5 rows to evaluate on."""
    folder = tmp_path_factory.mktemp("data")
    save_lm(folder / "lm")
    for name, count in (("data", 9), ("val", 5)):
        write_jsonl(folder / f"{name}.jsonl", ({
            "prompt": " ".join(WORDS[:2 + i % 4]),
            "completion": " " + " ".join(WORDS[i % 5:i % 5 + 3 + i])} for i in range(count)))
        write_jsonl(folder / f"{name}-pairs.jsonl", ({
            "prompt": " ".join(WORDS[:2 + i % 4]), "margin": 0.5 * (i % 2),
            "chosen": " " + " ".join(WORDS[i % 5:i % 5 + 3 + i]),
            "rejected": " " + " ".join(WORDS[9:12 + i % 3])} for i in range(count)))
    return {"model.path": str(folder / "lm"), "task.fn": "sft", "checkpoint.metric": "loss",
            "data.path": str(folder / "data.jsonl"), "data.val": str(folder / "val.jsonl"),
            "sft.mini_batch_size": 5, "sft.micro_batch_size": 2, "sft.epochs": 2,
            "sft.optimizer.name": "sgd", "sft.optimizer.lr": 1e-2, "sft.max_grad_norm": 0.5,
            "sft.scheduler.name": "cosine", "sft.eval_samples": 3,
            "generation.max_new_tokens": 6, "hardware.device": "cpu", "hardware.num_threads": 1,
            "hardware.gemm": "default"}


def one_and_two(folder: Path, config: dict, stage: int, tolerance: float, *more: str
                ) -> tuple[dict, dict]:
    """What one process and two under a stage come to, which is the same."""
    one = run_job(folder, "one", config, world=1, script=SCRIPT)
    many = run_job(folder, "many", {**config, **under(stage, folder)}, world=2, script=SCRIPT)
    for prefix in ("losses", "eval", "weight/", *more):
        assert largest_difference(one, many, prefix) < tolerance, prefix
    return one, many


@pytest.mark.slow
@pytest.mark.parametrize(("stage", "keys"), [
    (3, {}), *(pytest.param(*case, marks=pytest.mark.slow) for case in [
        (0, {}), (1, {}), (2, {}), (3, {"hardware.gather_for_generation": False}),
        (0, {"model.peft": LORA}), (3, {"model.peft": LORA}), (0, {"sft.neftune": 5.0}),
        (3, {"sft.neftune": 5.0}), (2, {"sft.micro_batch_size": None, "data.packing": False}),
        (0, {"sft.micro_batch_tokens": 20})])])
def test_two_ranks_give_the_numbers_of_one_process(config, tmp_path, stage, keys):
    one, many = one_and_two(tmp_path, {**config, **keys}, stage, 1e-6)
    assert many["shown"].tolist() == one["shown"].tolist()


def as_reward_model(config: dict) -> dict:
    """The same training, of a reward model."""
    values = {key.replace("sft.", "reward_model."): value for key, value in config.items()
              if not key.startswith(("sft.eval_samples", "generation."))}
    return {**values, "task.fn": "reward_model", "checkpoint.metric": "accuracy",
            "reward_model.center_coef": 0.1, **{key: config[key].replace(".jsonl", "-pairs.jsonl")
                                                for key in ("data.path", "data.val")}}


@pytest.mark.parametrize(("stage", "keys"), [
    pytest.param(*case, marks=pytest.mark.slow) for case in [
        (0, {}), (1, {}), (2, {}), (3, {}), (0, {"model.peft": LORA}), (3, {"model.peft": LORA}),
        (2, {"sft.micro_batch_size": None, "data.packing": False})]])
def test_two_ranks_give_the_reward_model_of_one_process(config, tmp_path, stage, keys):
    config = as_reward_model({**config, **keys})
    one_and_two(tmp_path, config, stage, 2e-6, "closing")
    merged = sorted(tmp_path.glob("*.model/model.safetensors"))
    if "model.peft" in config:
        left, right = map(load_file, merged)
        assert largest_difference(left, right, "") < 2e-6
    else:
        assert merged == []
