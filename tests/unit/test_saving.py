"""What is written from a copy while training goes on: the same bytes, and errors are told."""

import logging
import shutil
import signal
import threading
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from checkpoint_samples import tree
from helpers import save_lm
from safetensors.torch import load_file
from sessions import (
    estimate_of,
    experience_of,
    optimize,
    save_session,
    session_of,
    small_config,
    state_now,
)

from ppocli.errors import DiskError
from ppocli.estimate.parts import pinned_bytes
from ppocli.tasks.ppo.session import Session
from ppocli.tasks.ppo.task import PPOTask
from ppocli.training import background_saving as saving
from ppocli.training.background_saving import HostCopies, Saving, copied_bytes
from ppocli.training.checkpoint_writing import (
    OPTIMIZER,
    POLICY,
    contents_of,
    save_tensors,
    write_contents,
)

pytestmark = pytest.mark.long


def written(session: Session, folder: Path) -> dict[str, bytes]:
    """What a synchronous save puts into a checkpoint."""
    folder.mkdir()
    save_session(session, folder)
    return tree(folder)


KINDS = [
    ("llama", {"model__num_layers_unfrozen": 1}), ("bart", {}),
    ("t5", {"model__value__kind": "model"}),
    ("llama", {"model__peft": {"type": "lora", "r": 4}}),
    ("gpt2", {"ppo__optimizer__name": "adafactor", "ppo__value_optimizer__name": "sgd"}),
    ("gpt2", {"ppo__advantage": "grpo", "ppo__n": 2, "hardware__precision": "bf16"}),
    *(pytest.param(*case, marks=pytest.mark.slow) for case in (
        ("gpt2", {}), ("t5", {}),
        ("gpt2", {"model__value__kind": "branch", "model__value__num_layers_unfrozen": 1}),
        ("llama", {"model__peft": {"type": "prefix", "num_virtual_tokens": 3}}),
        ("gpt2", {"model__peft": {"type": "prompt", "num_virtual_tokens": 3}})))]


@pytest.mark.parametrize(("kind", "keys"), KINDS)
def test_a_copy_written_after_more_training_is_the_synchronous_save(kind, keys, tmp_path):
    save_lm(tmp_path / "lm", kind)
    cfg = small_config(tmp_path, hardware__num_threads=1, **keys)
    with session_of(cfg) as session:
        optimize(session, experience_of(session))
        contents = contents_of(PPOTask(session), state_now(session))
        size = copied_bytes(contents)
        copy = HostCopies().copy(contents, tmp_path)
        expected = written(session, tmp_path / "expected")
        optimize(session, experience_of(session, 16))
        assert written(session, tmp_path / "later") != expected
        (tmp_path / "found").mkdir()
        write_contents(copy, tmp_path / "found")
    assert tree(tmp_path / "found") == expected
    assert not list(tmp_path.glob(".tmp*"))
    told = estimate_of(cfg, 8)
    line, = (line for line in told.lines if line.name == "copy of a checkpoint")
    # counts of steps, a buffer of BART's, and the words that virtual tokens are made of, apart
    assert line.device == told.spared <= size
    assert size == pytest.approx(line.device, rel=0.03)


def test_the_memory_of_a_copy_is_taken_once(tmp_path):
    with session_of(small_config(tmp_path)) as session:
        optimize(session, experience_of(session))
        copies, state = HostCopies(), state_now(session)
        first = copies.copy(contents_of(PPOTask(session), state), tmp_path)
        places = {name: tensor.data_ptr() for name, tensor in first.files[OPTIMIZER].items()}
        before = first.files[OPTIMIZER]["value_head.outer.weight/exp_avg"].clone()
        optimize(session, experience_of(session, 16))
        second = copies.copy(contents_of(PPOTask(session), state), tmp_path)
    assert {name: tensor.data_ptr() for name, tensor in second.files[OPTIMIZER].items()} == places
    assert not torch.equal(second.files[OPTIMIZER]["value_head.outer.weight/exp_avg"], before)


def test_weights_that_do_not_train_are_shared(tmp_path):
    save_lm(tmp_path / "lm", "llama")
    with session_of(small_config(tmp_path, model__num_layers_unfrozen=1)) as session:
        copy = copy_of(session, tmp_path, wanted="always")
        trains = {name: p.requires_grad for name, p in session.policy.lm.named_parameters()}
        live = session.policy.lm.state_dict()
    assert len(set(trains.values())) == 2
    for name, yes in trains.items():
        assert (copy.files[POLICY][name].data_ptr() != live[name].data_ptr()) == yes, name


def test_tensors_in_the_same_memory_are_written_one_by_one(tmp_path):
    base = torch.arange(12.0).view(3, 4)
    save_tensors({"whole": base, "row": base[1], "turned": base.t()}, tmp_path / "x.safetensors")
    found = load_file(tmp_path / "x.safetensors")
    assert torch.equal(found["row"], torch.tensor([4.0, 5, 6, 7]))
    assert torch.equal(found["turned"], base.t())


def test_pinned_memory_is_a_power_of_two():
    assert [pinned_bytes(n) for n in (0, 1, 4096, 4097, 3 * 2**20)] == [0, 1, 4096, 8192, 4 * 2**20]


def copy_of(session: Session, folder: Path, found: Saving | None = None, wanted: str = ""):
    session.cfg.checkpoint.background = wanted or session.cfg.checkpoint.background
    return (found or Saving()).copy(PPOTask(session), state_now(session), folder / "checkpoints")


def test_a_copy_is_made_where_there_is_room(tmp_path, monkeypatch, caplog):
    with session_of(small_config(tmp_path)) as session, caplog.at_level(logging.INFO, "ppocli"):
        caplog.clear()
        assert copy_of(session, tmp_path, wanted="auto") is not None
        assert copy_of(session, tmp_path, wanted="never") is None
        assert not caplog.records
        # as much as a step is seen to take beside is not enough
        monkeypatch.setattr(saving, "host_room", saving._regrowth)
        assert copy_of(session, tmp_path, wanted="auto") is None
        assert "for want of a copy: it takes " in caplog.text
        assert copy_of(session, tmp_path, wanted="always") is not None
        held = Saving()
        assert copy_of(session, tmp_path, held, wanted="always") is not None
        assert copy_of(session, tmp_path, held, wanted="auto") is not None  # it has it already


@pytest.mark.parametrize(("wanted", "why"), [("auto", "it takes 4096 GiB, a step "),
                                             ("always", "there was no memory for it")])
def test_without_memory_for_a_copy_training_stops_and_the_log_says_so_once(
        wanted, why, tmp_path, caplog):
    cfg = small_config(tmp_path, checkpoint__background=wanted)
    with session_of(cfg) as session, caplog.at_level(logging.INFO, "ppocli"):
        caplog.clear()
        # a buffer of 4 TiB that takes four bytes, until it is copied
        session.policy.lm.register_buffer("huge", torch.zeros(1).expand(2**40))
        found = Saving()
        for _ in range(2):
            assert copy_of(session, tmp_path, found) is None
    said, = [record.getMessage() for record in caplog.records]
    assert said.startswith("Training stops while a checkpoint is written, for want of a copy: ")
    assert why in said


def test_small_files_that_can_not_be_put_down_leave_it_to_the_synchronous_save(tmp_path,
                                                                               monkeypatch):
    with session_of(small_config(tmp_path, checkpoint__background="always")) as session:
        state = state_now(session)
        with pytest.raises(OSError, match="no such place"):
            HostCopies().copy(contents_of(PPOTask(session), state),
                              tmp_path / "no such place")
        with monkeypatch.context() as patch:  # tokenizers have an exception of their own for it
            patch.setattr(type(session.tokenizer), "save_pretrained", Mock(
                side_effect=Exception("No space left on device (os error 28)")))
            assert copy_of(session, tmp_path) is None
        shutil.rmtree(tmp_path / "checkpoints")
        (tmp_path / "checkpoints").write_text("a file")
        assert copy_of(session, tmp_path) is None


def test_a_run_that_ends_waits_and_only_tells(caplog):
    found, ended = Saving(), threading.Event()

    def slow() -> None:
        ended.wait(0.2)
        ended.set()
        raise DiskError("Disk full writing step 2.", where="checkpoints", fix="free some space")

    found.begin(slow)
    with caplog.at_level(logging.ERROR, "ppocli"):
        found.settle()
    assert ended.is_set()
    assert "Disk full writing step 2." in caplog.text


def test_the_thread_gets_no_signals_that_the_main_thread_waits_for():
    found, blocked = Saving(), []
    found.begin(lambda: blocked.extend(signal.pthread_sigmask(signal.SIG_BLOCK, ())))
    found.wait()
    assert {signal.SIGINT, signal.SIGTERM, signal.SIGHUP} <= set(blocked)
    assert signal.SIGTERM not in signal.pthread_sigmask(signal.SIG_BLOCK, ())
