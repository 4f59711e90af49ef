"""The simulated device itself: what it sees, and that it computes what the host computes."""

import copy
from contextlib import suppress

import pytest
import torch
from simulated import MEMORY, MixedDevicesError, OnDevice, opened


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


def test_an_operation_of_both_sides_that_somebody_caught_is_told_at_the_end():
    with (pytest.raises(AssertionError, match="lie on the host"), opened(), suppress(RuntimeError)):
        torch.ones(2, device="sim").add(torch.ones(2))


@pytest.mark.parametrize(("work", "waits"), [
    (lambda x: x.sum().item(), 1), (lambda x: bool((x > 0).all()), 1), (lambda x: x.tolist(), 1),
    (lambda x: x.cpu(), 1), (lambda x: x[x > 1], 1), (lambda x: (x > 1).nonzero(), 1),
    (lambda x: x.masked_select(x > 1), 1), (lambda x: x.unique(), 1),
    (lambda x: x.copy_(torch.zeros(4)), 1), (lambda x: torch.zeros(4).copy_(x), 1),
    (lambda x: torch.zeros(4).to("sim"), 1), (lambda x: torch.tensor([1.0], device="sim"), 1),
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


def test_a_copy_without_waiting_arrives_with_the_next_wait(device):
    x = torch.arange(3.0, device="sim")
    late, pinned = x.to("cpu", non_blocking=True), torch.zeros(3, pin_memory=True)
    pinned.copy_(x, non_blocking=True)
    x.add_(1)
    assert late.tolist() != [0.0, 1.0, 2.0]
    assert pinned.tolist() == [0.0] * 3
    torch.sim.synchronize()
    assert late.tolist() == pinned.tolist() == [0.0, 1.0, 2.0]


def test_memory_is_what_storages_take_until_the_last_tensor_is_gone(device):
    before = MEMORY.allocated
    torch.sim.reset_peak_memory_stats()
    x = torch.zeros(1000, device="sim")
    part = x[10:20]
    assert MEMORY.allocated - before == 4000
    y = x * 2
    del x, y
    assert MEMORY.allocated - before == 4000
    del part
    assert MEMORY.allocated == before
    assert MEMORY.peak - before == 8000


def test_modules_move_train_and_are_copied_as_on_the_host(device):
    torch.manual_seed(0)
    first, second = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)
    second.weight = first.weight
    here = torch.nn.Sequential(first, second)
    there = copy.deepcopy(here).to("sim")
    assert there[0].weight is there[1].weight
    assert isinstance(copy.deepcopy(there)[0].weight, OnDevice)
    for module, x in ((here, torch.ones(2, 4)), (there, torch.ones(2, 4, device="sim"))):
        optimizer = torch.optim.AdamW(module.parameters(), lr=0.1, fused=True)
        for _ in range(2):
            optimizer.zero_grad()
            module(x).square().sum().backward()
            torch.nn.utils.clip_grad_norm_(module.parameters(), 1.0)
            optimizer.step()
    assert sum(device.take().values()) == len(list(here.parameters()))  # moving them
    torch.testing.assert_close(there[0].weight.detach().cpu(), here[0].weight.detach())


def test_attention_is_that_of_the_host_and_autocast_computes_in_its_type(device):
    query, key = torch.randn(2, 4, 5, 8), torch.randn(2, 2, 5, 8)
    mask = torch.ones(5, 5, dtype=torch.bool).tril()
    wanted = torch.nn.functional.scaled_dot_product_attention(
        query, key, key, attn_mask=mask, enable_gqa=True)
    found = torch.nn.functional.scaled_dot_product_attention(
        query.to("sim"), key.to("sim"), key.to("sim"), is_causal=True, enable_gqa=True)
    torch.testing.assert_close(found.cpu(), wanted)
    with torch.autocast("sim", dtype=torch.bfloat16):
        assert (query.to("sim") @ query.to("sim").mT).dtype == torch.bfloat16
        assert torch.nn.functional.linear(query.to("sim"), torch.ones(
            3, 8, device="sim")).dtype == torch.bfloat16
