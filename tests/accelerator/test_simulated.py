"""The simulated device itself: what it sees, and that it computes what the host computes."""

import pytest
import torch
from simulated import MixedDevicesError, opened


@pytest.fixture
def device():
    with opened() as device:
        yield device


def test_operations_of_both_sides_raise_and_numbers_without_dimensions_do_not(device):
    here, there = torch.ones(3), torch.ones(3, device="sim")
    for work in (lambda: here + there, lambda: there.index_select(0, torch.tensor([0])),
                 lambda: there[torch.tensor([0, 1])], lambda: torch.cat([there, here]),
                 lambda: there.add_(here), lambda: torch.where(there > 0, there, here)):
        with pytest.raises(MixedDevicesError, match="lie on the host"):
            work()
    assert len(device.mixed) == 6
    device.mixed.clear()
    assert (there + torch.tensor(2.0)).tolist() == [3.0] * 3


@pytest.mark.parametrize(("work", "waits"), [
    (lambda x: x.sum().item(), 1), (lambda x: bool((x > 0).all()), 1), (lambda x: x.tolist(), 1),
    (lambda x: x.cpu(), 1), (lambda x: x[x > 1], 1), (lambda x: (x > 1).nonzero(), 1),
    (lambda x: torch.zeros(4).copy_(x), 1), (lambda x: torch.zeros(4).to("sim"), 1),
    (lambda x: x.to("cpu", non_blocking=True), 0), (lambda x: x.masked_fill_(x > 1, 0.0), 0),
    (lambda x: torch.zeros(4).pin_memory().to("sim", non_blocking=True), 0),
    (lambda x: torch.zeros(4).to("sim", non_blocking=True), 1),
    (lambda x: x.repeat_interleave(torch.ones_like(x, dtype=torch.long)), 1),
    (lambda x: x.repeat_interleave(torch.ones_like(x, dtype=torch.long), output_size=4), 0),
    (lambda x: (x @ x).exp().log_softmax(0), 0), (torch.zeros_like, 0),
    (lambda x: torch.arange(4, device="sim")[x > 1], 1),
    (lambda x: x[1:].view(1, 3).t().contiguous(), 0)])
def test_waits_are_counted(device, work, waits):
    x = torch.arange(4.0, device="sim")
    device.take()
    work(x)
    assert sum(device.take().values()) == waits
