"""ZeRO 3 with policy and reference in parts: what one process comes to, in less memory.

A job makes several sessions one after another: to start its processes costs more than these.
"""

from pathlib import Path

import pytest
import ranks
from helpers import make_tokenizer, model_config, save_lm
from ranks import largest_difference, odd_config, under
from safetensors.torch import load_file, save_file
from sessions import set_keys
from transformers import AutoModelForSequenceClassification

from ppocli.config.problems import find_problems
from ppocli.config.schema import TrainConfig

APART = {"hardware.gather_for_generation": False}
SHARED = {"model.num_layers_unfrozen": 1}
pytestmark = pytest.mark.timeout(900)


@pytest.fixture(scope="module")
def config(tmp_path_factory) -> dict:
    return odd_config(tmp_path_factory.mktemp("parts"), **{
        "ppo.logprobs_from": "forward", "generation.stop_token_ids": [10, 19, 24, 36]})


def run_sessions(folder: Path, name: str, config: dict, scenarios: dict, *, world: int = 2) -> dict:
    """What each scenario came to: scenario -> name -> tensor."""
    found = ranks.run_job(folder, name, {**config, "scenarios": scenarios}, world=world,
                          script=Path(__file__).with_name("parts.py"), timeout=800)
    split: dict = {}
    for key, tensor in found.items():
        scenario, _, rest = key.partition("/")
        split.setdefault(scenario, {})[rest] = tensor
    return split


def assert_same(one: dict, other: dict, tolerance: float = 2e-6) -> None:
    assert other["counts"].tolist() == one["counts"].tolist()
    for prefix in ("kl", "scores", "experience/", "terms", "weight/", "later/", "eval"):
        assert largest_difference(one, other, prefix) < tolerance, prefix
    if "digest" in one:
        assert one["digest"].tolist() == other["digest"].tolist()


@pytest.fixture(scope="module")
def alone(config, tmp_path_factory) -> dict:
    return run_sessions(tmp_path_factory.mktemp("alone"), "alone", config,
                        {"copy": {}, "shared": SHARED}, world=1)


@pytest.fixture(scope="module")
def in_parts(config, tmp_path_factory) -> dict:
    folder = tmp_path_factory.mktemp("many")
    return run_sessions(folder, "many", {**config, **under(3, folder)}, {
        "copy": {}, "copy apart": APART, "shared apart": {**SHARED, **APART}})


@pytest.mark.slow
@pytest.mark.parametrize("scenario", ["copy", "copy apart", "shared apart"])
def test_two_ranks_come_to_what_one_process_comes_to(alone, in_parts, scenario):
    assert_same(alone[scenario.split()[0]], in_parts[scenario])


@pytest.mark.slow
def test_the_kl_starts_at_zero(alone, in_parts):
    for found in (*alone.values(), *in_parts.values()):
        assert float(found["kl"].abs().max()) == 0.0
        assert float(found["later/kl"].abs().max()) > 0.0


@pytest.mark.slow
def test_ranks_end_their_chunks_at_different_tokens(alone):
    """So that they had to wait for each other where passes gather weights."""
    lengths = alone["copy"]["experience/response_mask"].sum(1).tolist()
    dealt = [lengths[rank::2] for rank in (0, 1)]
    longest = [[max(rows[start:start + 3]) for start in (0, 3)] for rows in dealt]
    assert longest[0] != longest[1]


@pytest.mark.slow
def test_every_rank_holds_its_part(alone, in_parts):
    """Half of policy and reference, and whole weights only where they are gathered; a tensor of
    odd size is filled up by one element."""
    [whole, reference, _, _], = alone["copy"]["sizes"].tolist()
    for scenario, found in in_parts.items():
        for policy, kept, acting, _ in found["sizes"].tolist():
            assert 0 <= policy - whole / 2 < 40
            assert 0 <= kept - reference / 2 < 40
            # with all weights whole, or with those of the two heads
            if scenario.startswith("copy"):
                assert acting == whole if scenario == "copy" else acting < 0.7 * whole


SCENARIOS = {
    "shared": SHARED, "everything shared": {"model.reference.kind": "shared"},
    "everything shared apart": {"model.reference.kind": "shared", **APART},
    "whole reference": {"model.reference.shard": False},
    "offloaded reference": {"model.reference.offload": True},
    "full kl apart": {"ppo.kl_estimator": "full", "ppo.logprobs_from": "decode", **APART},
    "branch": {"model.value.kind": "branch", "model.value.num_layers_unfrozen": 1},
    "value model apart": {"model.value.kind": "model", **APART}}


@pytest.mark.slow
def test_every_kind_of_reference_and_value_function(config, tmp_path):
    other = str(save_lm(tmp_path / "llama", "llama", tie_word_embeddings=False))
    scenarios = {**SCENARIOS, "another model apart": {"model.path": other, **SHARED, **APART},
                 "another reference": {"model.reference.path": other}}
    plain = {name: {key: value for key, value in keys.items()
                    if key not in APART and not key.endswith(("shard", "offload"))}
             for name, keys in scenarios.items()}
    one = run_sessions(tmp_path, "one", config, plain, world=1)
    many = run_sessions(tmp_path, "many", {**config, **under(3, tmp_path)}, scenarios)
    for name in scenarios:
        assert_same(one[name], many[name])


@pytest.mark.slow
@pytest.mark.parametrize("offloaded", [False, True])
def test_parameters_that_deepspeed_leaves_whole_or_in_host_memory(config, alone, tmp_path,
                                                                  offloaded):
    """Its own threshold: all of so small a model."""
    more = under(3, tmp_path) if offloaded else {"hardware.zero_stage": 3}
    many = run_sessions(tmp_path, "many", {
        **config, **more, "hardware.offload_param": offloaded}, {
        "copy": {}, "copy apart": APART, "shared apart": {**SHARED, **APART}})
    for name, found in many.items():
        assert_same(alone[name.split()[0]], found)


@pytest.mark.slow
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_gradient_checkpointing_and_the_optimizers_part(config, tmp_path, stage):
    """Recomputed activations give the same updates; Adam's state is one rank's half."""
    adam = {**config, "ppo.optimizer.name": "adamw", "ppo.optimizer.lr": 1e-3}
    again = {"model.gradient_checkpointing": True}
    [one] = run_sessions(tmp_path, "one", adam, {"kept": {}}, world=1).values()
    many = run_sessions(tmp_path, "many", {**adam, **under(stage, tmp_path)}, {
        "kept": {}, "again": again})
    for name in ("weight/", "terms", "later/"):
        assert largest_difference(many["kept"], many["again"], name) < 1e-6
    assert largest_difference(one, many["again"], "terms") < 1e-5
    whole = one["sizes"][0][3]
    for *_, state in many["kept"]["sizes"].tolist():
        assert state < 0.51 * whole


@pytest.mark.slow
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_bf16_under_every_stage(config, tmp_path, stage):
    """What is gathered and reduced is fp32, so only the order of sums differs from one process."""
    half = {**config, "hardware.precision": "bf16"}
    scenarios = {"copy": {}, "shared": SHARED}
    one = run_sessions(tmp_path, "one", half, scenarios, world=1)
    many = run_sessions(tmp_path, "many", {**half, **under(stage, tmp_path)}, scenarios)
    for name in scenarios:
        assert many[name]["counts"].tolist() == one[name]["counts"].tolist()
        assert many[name]["digest"].tolist() == one[name]["digest"].tolist()
        for prefix in ("kl", "scores", "experience/response"):
            assert largest_difference(one[name], many[name], prefix) == 0.0, prefix
        assert largest_difference(one[name], many[name], "weight/") < 1e-4


@pytest.mark.slow
def test_a_classifier_that_judges_is_not_sharded(config, tmp_path):
    judge = str(tmp_path / "judge")
    AutoModelForSequenceClassification.from_config(model_config(
        "gpt2", id2label={0: "negative", 1: "POSITIVE"}, label2id={"negative": 0, "POSITIVE": 1},
        initializer_range=0.2)).save_pretrained(judge)
    make_tokenizer().save_pretrained(judge)
    judged = {**config, "reward.fn": "classifier", "reward.kwargs": {"model": judge}}
    one = run_sessions(tmp_path, "one", judged, {"copy": {}}, world=1)
    many = run_sessions(tmp_path, "many", {**judged, **under(3, tmp_path)}, {"copy": {}})
    assert_same(one["copy"], many["copy"])
    assert len(set(one["copy"]["scores"].tolist())) > 1


@pytest.mark.slow
def test_a_model_that_lacks_weights_ends_all_ranks(config, tmp_path):
    broken = save_lm(tmp_path / "broken")
    weights = load_file(broken / "model.safetensors")
    del weights[next(name for name in weights if name.endswith("ln_f.weight"))]
    save_file(weights, broken / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(AssertionError, match="lacks 1 weights"):
        run_sessions(tmp_path, "many", {**config, **under(3, tmp_path),
                                        "model.path": str(broken)}, {"copy": {}})


@pytest.mark.parametrize(("settings", "key"), [
    (APART, "hardware.gather_for_generation"),
    ({"model.reference.shard": True}, "model.reference.shard")])
def test_settings_that_say_nothing_are_refused(settings, key):
    problems = find_problems(set_keys(TrainConfig(), settings))
    assert key in " ".join(problem.key for problem in problems)
