"""Hypothesis judges what it finds, not how long a busy machine takes to make it up; and what is not
part of ``make test-fast``."""

import pytest
from hypothesis import HealthCheck, settings

settings.register_profile("any machine", deadline=None,
                          suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any machine")

LONG = (
    "adapters", "adapters_merged", "checkpoints_crashes", "config_words", "data_folders",
    "dynamic_sampling", "encoder_decoder", "engine_kinds", "episodes", "estimate",
    "frozen_states", "gemm", "generation_lengths", "heap", "library_generation",
    "library_parts", "off_policy", "one_file", "optimizers", "packing", "ptx", "publishing",
    "refill", "reward_model_task", "reward_styles", "rewards_models", "run_folder", "sft_task",
    "stop", "token_budget", "token_graph", "trackers", "value_function", "vllm", "vocabulary",
    "work")
"""files whose tests train, load many models, start processes or wait"""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.parent.name == "unit" and item.path.stem.removeprefix("test_") in LONG:
            item.add_marker(pytest.mark.long)
