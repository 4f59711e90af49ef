"""1, 2 and 4 ranks, ZeRO 0 to 3, any micro-batch: one and the same update from one rollout."""


import pytest
from helpers import write_jsonl
from ranks import assert_same_update, largest_difference, odd_config, run_job, under

slow = pytest.mark.slow

LORA = {"type": "lora", "r": 4, "target_modules": ["c_attn", "c_fc"]}
ADAM = {"ppo.optimizer.name": "adamw"}
pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="module")
def config(tmp_path_factory) -> dict:
    return odd_config(tmp_path_factory.mktemp("ranks"), **{
        "ppo.ppo_epochs": 2, "ppo.max_grad_norm": 0.5, "ppo.ent_coef": 0.01})


@pytest.fixture(scope="module")
def alone(config, tmp_path_factory) -> dict:
    return run_job(tmp_path_factory.mktemp("alone"), "alone", config, world=1)


def one_and_two(folder, config: dict, more: dict) -> tuple[dict, dict]:
    """What one process and two come to, of which only the two have the settings ``more``."""
    one = run_job(folder, "one", config, world=1)
    many = run_job(folder, "many", {**config, **more}, world=2)
    assert_same_update(one, many)
    return one, many


@pytest.mark.parametrize(("world", "stage"), [(2, 3), *(
    pytest.param(*pair, marks=slow) for pair in [
        (2, 0), (2, 1), (2, 2), (4, 0), (4, 3), (1, 2)])])
def test_one_update_is_the_same_on_any_ranks(config, alone, tmp_path, world, stage):
    found = run_job(tmp_path, "many", {**config, **under(stage, tmp_path)}, world=world)
    assert_same_update(alone, found)


@slow
@pytest.mark.parametrize(("stage", "critic"), [
    (0, "head"), (3, "head"), (0, "adapter"), (1, "adapter"), (2, "adapter"), (3, "adapter")])
def test_an_adapter_learns_the_same_on_two_ranks(config, tmp_path, stage, critic):
    one, _ = one_and_two(tmp_path, {**config, "model.peft": LORA, "model.value.kind": critic},
                         under(stage, tmp_path))
    trained = {name for name in one if name.startswith("weight/lm.")}
    assert trained
    assert all("lora_" in name for name in trained)


@slow
@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize("keys", [
    {"ppo.micro_batch_size": 5},
    {"ppo.micro_batch_tokens": 23, "hardware.gather_for_generation": False}])
def test_the_micro_batch_changes_nothing(config, alone, tmp_path, stage, keys):
    found = run_job(tmp_path, "many", {**config, **under(stage, tmp_path), **keys}, world=2)
    assert_same_update(alone, found)


@slow
@pytest.mark.parametrize("changes", [
    {"hardware.zero_stage": 3, "hardware.offload_optimizer": True, "hardware.offload_param": True},
    {"hardware.zero_stage": 3, "model.gradient_checkpointing": True},
    {"hardware.zero_stage": 2, "model.num_layers_unfrozen": 1},
    {"hardware.zero_stage": 3, "ppo.critic_warmup_steps": 1}, {"ppo.critic_epochs": 2},
    {"ppo.loss_aggregation": "seq-mean-token-mean", "ppo.whiten_rewards": True},
    {"hardware.zero_stage": 2, "ppo.optimizer.momentum": 0.9},
    {"ppo.kl_in": "loss", "ppo.kl_estimator": "full", "hardware.zero_stage": 3,
     "model.reference.shard": False}])
def test_settings_that_move_weights_elsewhere(config, tmp_path, changes):
    one_and_two(tmp_path, {**config, **{name: value for name, value in changes.items()
                                        if not name.startswith("hardware.")}}, changes)


@pytest.mark.slow
@pytest.mark.parametrize(("stage", "keys"), [
    (0, {"model.value.kind": "model"}), (3, {"ppo.micro_batch_size": 5})])
def test_examples_that_are_mixed_in_are_the_same_on_two_ranks(config, tmp_path, stage, keys):
    """3 examples an update, of which one rank gets two micro-batches less than samples."""
    write_jsonl(tmp_path / "texts.jsonl", (
        {"prompt": "the film", "completion": " good" * n} for n in range(1, 8)))
    base = {**config, "ppo.ptx.coef": 0.5, "ppo.ptx.mini_batch_size": 3,
            "ppo.ptx.data.path": str(tmp_path / "texts.jsonl"), **keys}
    one_and_two(tmp_path, base, under(stage, tmp_path))


@pytest.mark.slow
@pytest.mark.parametrize(("advantage", "stage"), [
    ("grpo", 0), ("rloo", 3), ("reinforce_pp", 0)])
def test_estimators_without_a_critic_are_the_same_on_any_ranks(config, tmp_path, advantage, stage):
    """14 samples in groups of two, which chunks of 3 and shares of the ranks cut through."""
    base = {**config, "ppo.advantage": advantage, "ppo.n": 2, "ppo.num_rollouts": 14}
    if (advantage, stage) == ("grpo", 0):  # whose KL is in the loss
        base |= {"ppo.kl_estimator": "full", "ppo.dynamic_sampling": 4}
    one, many = one_and_two(tmp_path, base, under(stage, tmp_path))
    assert one["drawn"] == many["drawn"]
    assert (one["drawn"] > 14) == ("ppo.dynamic_sampling" in base)


PLAYS = {"env.fn": "played:Words", "env.max_turns": 3, "env.max_tokens": 40,
         "generation.max_new_tokens": 5, "ppo.gae_unit": "turn", "ppo.gamma": 0.5}
GROUPS = {"ppo.advantage": "grpo", "ppo.n": 2, "ppo.num_rollouts": 14, "ppo.gae_unit": "token"}


@pytest.mark.slow
@pytest.mark.parametrize(("keys", "stage"), [
    ({}, 3), ({"model.peft": LORA}, 0), ({"model.num_layers_unfrozen": 1}, 2), (GROUPS, 0)])
def test_episodes_of_several_turns_are_the_same_on_two_ranks(config, tmp_path, keys, stage):
    one, _ = one_and_two(tmp_path, {**config, **PLAYS, **keys}, under(stage, tmp_path))
    assert int(one["experience/response_mask"].sum(1).max()) > 5, "no episode has a second turn"


@slow
@pytest.mark.parametrize("stage", [0, 3])
def test_a_skipped_minibatch_changes_nothing_on_any_rank(config, tmp_path, stage):
    """The second of four updates is not finite, and the ratio guard refuses none."""
    settings = {**config, **ADAM}
    fault = {"PPOCLI_FAULTS": "optimize.minibatch@2:nan"}
    one = run_job(tmp_path, "one", settings, world=1, **fault)
    many = run_job(tmp_path, "many", {**settings, **under(stage, tmp_path)}, world=2, **fault)
    assert many["counts"].tolist() == one["counts"].tolist() == [3, 1, 0]
    assert largest_difference(one, many, "state/") < 1e-6


@slow
@pytest.mark.parametrize("stage", [0, 3])
def test_the_ratio_guard_and_the_early_stop_are_of_all_ranks(config, tmp_path, stage):
    # in one process the ratios are 1 + 1e-7, 0.9987, 0.9950, 1.0072 and the KLs 2e-8, 1.4e-3, ...:
    # thresholds far from all of them, which rounding can't cross
    for guard in ({"ppo.ratio_threshold": 1.003}, {"ppo.target_kl": 1e-4}):
        settings = {**config, **guard}
        one = run_job(tmp_path, "one", settings, world=1)
        many = run_job(tmp_path, "many", {**settings, **under(stage, tmp_path)}, world=2)
        assert many["counts"].tolist() == one["counts"].tolist()
        assert one["counts"][0] < 4
        assert largest_difference(one, many, "weight/") < 1e-6


# Checkpoints --------------------------------------------------------------------------------------

@slow
@pytest.mark.parametrize("peft", [None, LORA])
@pytest.mark.parametrize("stage", [0, 3])
def test_a_checkpoint_goes_on_exactly_and_on_other_ranks(config, tmp_path, stage, peft):
    """Saved after the first step, read for the second: byte for byte on as many ranks, and within
    rounding in one process, which reads the same files."""
    config = {**config, **ADAM, "model.peft": peft}
    settings = {**config, **under(stage, tmp_path)}
    saved = tmp_path / "checkpoint"
    through = run_job(tmp_path, "through", settings, f"save={saved}", world=2)
    names = {path.name for path in saved.rglob("*") if path.is_file()}
    weights = "adapter_model.safetensors" if peft else "model.safetensors"
    assert {weights, "value_head.safetensors", "optimizer-00001-of-00002.safetensors",
            "optimizer-00002-of-00002.safetensors", "rng.json", "rng-rank-00001.json"} <= names
    assert not [name for name in names if name.endswith((".pt", ".bin", ".pkl"))]
    again = run_job(tmp_path, "again", settings, f"load={saved}", world=2)
    for prefix in ("weight/", "state/", "eval"):
        assert largest_difference(through, again, prefix) == 0.0, prefix
    one = run_job(tmp_path, "one", config, f"load={saved}", world=1)
    assert largest_difference(through, one, "state/") < 1e-6
