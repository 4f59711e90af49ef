"""Passes that are made anew with half the rows, and what counts as a lack of memory."""

import logging

import pytest
import torch
from sessions import session_of, small_config

from ppocli.errors import OutOfMemoryError
from ppocli.parallel.ranks import is_out_of_memory

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


@pytest.mark.long
def test_rows_are_halved_for_good_and_for_one_phase_alone(tmp_path, caplog):
    with session_of(small_config(tmp_path)) as session, caplog.at_level(logging.WARNING):
        tried: list[int] = []

        def work(phase: str, most: int) -> str:
            tried.append(session.passes.limit(phase, 11))
            take(PIB if tried[-1] > most else 1)
            return "done"

        assert session.passes.retry("rollout", 11, 7, lambda: work("rollout", 3)) == "done"
        assert session.passes.retry("rollout", 11, 7, lambda: work("rollout", 3)) == "done"
        assert session.passes.retry("scoring", 11, 7, lambda: work("scoring", 11)) == "done"
        assert tried == [11, 5, 2, 2, 11]
        assert session.passes.figures() == {"memory/rows/rollout": 2.0}
        assert [record.getMessage() for record in caplog.records] == [
            "rollout of 11 rows at once: out of memory; going on with 5 (ppo.chunk_size=5 starts "
            "so)", "rollout of 5 rows at once: out of memory; going on with 2 (ppo.chunk_size=2 "
            "starts so)"]
        with pytest.raises(OutOfMemoryError, match="its longest sample has 7 tokens; this process "
                                                   "held up to ") as floor:
            session.passes.retry("optimize", 3, 7, lambda: take(PIB))
        assert floor.value.exit_code == 8
        with pytest.raises(RuntimeError, match="inconsistent tensor size"):
            session.passes.retry("optimize", 3, 7, lambda: torch.zeros(2) @ torch.zeros(3))


def test_a_pass_of_all_ranks_names_the_setting_to_start_again_with(tmp_path):
    with session_of(small_config(tmp_path)) as session:
        with pytest.raises(OutOfMemoryError, match="with 5 rows a pass") as short:
            session.passes.once("optimize", 5, 7, lambda: take(PIB))
        assert (short.value.alone, short.value.retry) == (True, {"ppo.micro_batch_size": 2})
        with pytest.raises(OutOfMemoryError, match="with 1 row a pass, and a pass can't") as floor:
            session.passes.once("optimize", 1, 7, lambda: take(PIB))
        assert (floor.value.alone, floor.value.retry) == (True, {})
