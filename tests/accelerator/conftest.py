"""Tests of the engine on a device that isn't there. They run in a process of their own, which
``tests/unit/test_accelerator.py`` starts: torch has to know the device before the first backward
pass of a process, and then knows it until the end."""

import os
from collections.abc import Iterator

import pytest

if "PPOCLI_SIMULATED" in os.environ:
    import simulated

    simulated.register()
else:
    collect_ignore_glob = ["test_*.py"]


@pytest.fixture
def sim(monkeypatch: pytest.MonkeyPatch) -> Iterator["simulated.Simulated"]:
    """The device, which ``hardware.device=cuda`` stands for."""
    import torch

    with simulated.opened() as device:
        monkeypatch.setenv("ACCELERATE_TORCH_DEVICE", "sim")  # without a number, as CUDA's is
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        yield device
