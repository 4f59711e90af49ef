"""What counts as a lack of memory, and how it is told; that passes are made anew with half the rows
is seen in tests/faults."""

import pytest
import torch
from sessions import session_of, small_config

from ppocli.distributed.ranks import is_out_of_memory
from ppocli.errors import OutOfMemoryError

PIB = 2**50


def take(size: int) -> None:
    """Ask the CPU's allocator for some bytes."""
    torch.empty(size, dtype=torch.uint8)


def test_what_counts_as_a_lack_of_memory():
    with pytest.raises(RuntimeError) as lacking:
        take(PIB)
    assert is_out_of_memory(lacking.value)
    assert is_out_of_memory(torch.OutOfMemoryError("CUDA out of memory."))
    with pytest.raises(RuntimeError) as other:
        torch.zeros(2) @ torch.zeros(3)
    assert not is_out_of_memory(other.value)
    assert not is_out_of_memory(MemoryError())


def test_a_pass_of_all_ranks_names_the_setting_to_start_again_with(tmp_path):
    with session_of(small_config(tmp_path)) as session:
        with pytest.raises(OutOfMemoryError, match="with 5 rows a pass") as short:
            session.passes.once("optimize", 5, 7, lambda: take(PIB))
        assert (short.value.alone, short.value.retry) == (True, {"ppo.micro_batch_size": 2})
        with pytest.raises(OutOfMemoryError, match="with 1 row a pass, and a pass can't") as floor:
            session.passes.once("optimize", 1, 7, lambda: take(PIB))
        assert (floor.value.alone, floor.value.retry) == (True, {})
        with pytest.raises(RuntimeError, match="inconsistent tensor size"):
            session.passes.retry("optimize", 3, 7, lambda: torch.zeros(2) @ torch.zeros(3))
