"""Damaged, foreign, hostile and missing checkpoints; two processes; changed settings."""

import shutil
import socket
from pathlib import Path

import pytest
from runs import assert_equal_runs, copied, spawn, wait_for, whole_copy, words


def flip(path: Path) -> None:
    raw = bytearray(path.read_bytes())
    raw[len(raw) // 2] ^= 1
    path.write_bytes(raw)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


# every file in every way: tests/unit/test_checkpoints_corruption.py
@pytest.mark.parametrize(("name", "damage"), [
    ("policy/model.safetensors", flip), ("MANIFEST.json", cut)])
def test_a_damaged_checkpoint_is_named_and_an_older_one_taken(name, damage, command, reference,
                                                              tmp_path):
    """In a run that was moved."""
    folder = tmp_path / "with space ü"
    copied(reference, tmp_path / "made here", 3).rename(folder)
    damage(folder / "checkpoints/step-000003" / name)
    ended = command(f"resume={folder}", code=0)
    assert "skipped step-000003: " in ended.err
    assert name in ended.err
    assert "resuming step 2 of 4" in ended.out
    assert_equal_runs(reference, folder)


def test_with_every_checkpoint_damaged_the_run_is_refused_and_kept(command, reference, tmp_path):
    folder = copied(reference, tmp_path / "run", 2)
    for step in (1, 2):
        flip(folder / f"checkpoints/step-00000{step}/policy/model.safetensors")
    before = tree(folder)
    ended = command(f"resume={folder}", code=5)
    assert "No valid checkpoint in" in ended.err
    assert "step-000001: policy/model.safetensors hash mismatch" in ended.err
    assert tree(folder) == before


def tree(folder: Path) -> dict[str, bytes | None]:
    """Everything below a folder, apart from the lock's name and the links for people."""
    return {str(path.relative_to(folder)): path.read_bytes() if path.is_file() else None
            for path in sorted(folder.rglob("*"))
            if path.name not in (".lock", "latest", "best", "ppocli.log")}


def test_a_folder_without_checkpoint_is_refused_or_with_auto_begun(command, reference, world):
    folder = copied(reference, world / "runs/r", 0)
    shutil.rmtree(folder / "checkpoints")
    before = tree(folder)
    ended = command(f"resume={folder}", code=5)
    assert "resume=auto" in ended.err
    assert tree(folder) == before
    assert "the same words and resume=auto" in command(*words("run_name=r"), code=5).err
    own = reference.parents[1]
    ended = command(*words("run_name=r", "resume=auto", f"model.path={own}/lm",
                           f"prompts.path={own}/prompts.jsonl", stateful=True), code=0)
    assert "the run starts from the beginning" in ended.said
    assert_equal_runs(reference, folder)


def test_a_damaged_run_id_is_refused(command, reference, tmp_path):
    folder = copied(reference, tmp_path / "run", 2)
    (folder / "run.json").write_text("{")
    ended = command(f"resume={folder}", code=5)
    assert "run.json is damaged" in ended.err


@pytest.mark.parametrize(("words_", "code", "said"), [
    (["hardware.precision=bf16", "prompts.shuffle=false"], 5,
     ["fp32 -> bf16", "prompts.shuffle: true -> false"]),
    (["ppo.optimizer.name=sgd", "seed=3"], 5, ["adamw -> sgd", "seed: 0 -> 3"]),
    (["reward.fn=nosuch:f"], 7, ["nosuch"]), (["generation.max_new_tokens=5000"], 2, ["5000"])])
def test_a_refused_change_leaves_the_run_as_it_was(words_, code, said, command, reference,
                                                   tmp_path):
    folder = copied(reference, tmp_path / "run", 2)
    before = tree(folder)
    ended = command(f"resume={folder}", *words_, code=code)
    assert [part for part in said if part not in ended.err] == []
    assert tree(folder) == before


def test_a_finished_run_says_so(command, reference, tmp_path):
    folder = whole_copy(reference, tmp_path / "run")
    before = tree(folder)
    ended = command(f"resume={folder}", code=0)
    assert "already finished (4/4 steps)" in ended.said
    assert ended.out.splitlines()[-1] == str(folder / "model")
    assert tree(folder) == before


def test_a_finished_runs_missing_model_is_written_again(command, reference, tmp_path):
    folder = whole_copy(reference, tmp_path / "run")
    (folder / "model/model.safetensors").unlink()
    command(f"resume={folder}", code=0)
    assert_equal_runs(reference, folder)


def test_a_second_process_on_the_folder_is_refused_with_its_pid(command, world, inject):
    process = spawn("train", *words("run_name=r"), cwd=world,
                    PPOCLI_FAULTS="rollout.token@60:sleep=60")
    try:
        wait_for((world / "runs/r/checkpoints/step-000001").exists, process)
        ended = command(f"resume={world / 'runs/r'}", code=5)
        assert f"in use by process {process.pid} on {socket.gethostname()}" in ended.err
    finally:
        process.kill()
        process.communicate()
    # what it left names a dead process: taken over
    assert str(process.pid) in (world / "runs/r/.lock").read_text()
    assert command(f"resume={world / 'runs/r'}").code == 0
