"""The doctor's questions, in the order in which they are asked: the quick ones first."""

from __future__ import annotations

from ppocli.doctor import devices, folders, libraries, machine, network
from ppocli.doctor.checking import Check

CHECKS = (
    Check("python", machine.python),
    Check("packages", libraries.packages),
    Check("transformers", libraries.transformers),
    Check("hydra", libraries.hydra),
    Check("memory", machine.memory),
    Check("shm", machine.shared_memory),
    Check("disk", folders.disk),
    Check("output", folders.output, seconds=20),
    Check("hub", network.hub),
    Check("token", network.token, seconds=20),
    Check("accelerate", libraries.accelerate),
    Check("torch", devices.torch, seconds=70),
    Check("devices", devices.devices),
    Check("bf16", devices.bf16),
    Check("threads", machine.threads),
    Check("deepspeed", libraries.deepspeed, seconds=70),
    Check("gloo", devices.collectives, seconds=40),
)
