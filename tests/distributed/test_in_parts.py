"""ZeRO 3 with policy and reference in parts: what one process comes to, in less memory.

A job makes several sessions one after another: to start its processes costs more than these.
"""

from pathlib import Path

import pytest
import ranks
from helpers import save_lm
from ranks import largest_difference, odd_config, under
from sessions import set_keys

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
def test_every_rank_holds_its_part(alone, in_parts):
    """Half of policy and reference, and whole weights only where they are gathered; a tensor of
    odd size is filled up by one element."""
    [whole, reference, _], = alone["copy"]["sizes"].tolist()
    for scenario, found in in_parts.items():
        for policy, kept, acting in found["sizes"].tolist():
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


@pytest.mark.parametrize(("settings", "key"), [
    (APART, "hardware.gather_for_generation"),
    ({"model.reference.shard": True}, "model.reference.shard")])
def test_settings_that_say_nothing_are_refused(settings, key):
    problems = find_problems(set_keys(TrainConfig(), settings))
    assert key in " ".join(problem.key for problem in problems)
