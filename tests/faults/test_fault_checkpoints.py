"""Damaged, foreign, hostile and missing checkpoints; two processes; changed settings."""

import shutil
from pathlib import Path

import pytest
from helpers import jsonl
from runs import assert_equal_runs, copied, whole_copy, words

from ppocli.runs import retention
from ppocli.runs.record import read_changes


def flip(path: Path) -> None:
    raw = bytearray(path.read_bytes())
    raw[len(raw) // 2] ^= 1
    path.write_bytes(raw)


@pytest.mark.slow
def test_a_damaged_checkpoint_is_named_and_an_older_one_taken(command, reference, tmp_path):
    """In a run that was moved; every file in every way: tests/unit/test_checkpoints_damage.py."""
    folder = tmp_path / "with space ü"
    copied(reference, tmp_path / "made here", 3).rename(folder)
    flip(folder / "checkpoints/step-000003/policy/model.safetensors")
    ended = command(f"resume={folder}", code=0)
    assert "skipped step-000003: policy/model.safetensors " in ended.err
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
    assert "resume=auto" in command(f"resume={folder}", code=5).err
    assert "the same words and resume=auto" in command(*words("run_name=r"), code=5).err
    assert tree(folder) == before
    own = reference.parents[1]
    ended = command(*words("run_name=r", "resume=auto", "ppo.num_steps=1", f"model.path={own}/lm",
                           f"prompts.path={own}/prompts.jsonl", stateful=True), code=0)
    assert "the run starts from the beginning" in ended.said
    assert [row["step"] for row in jsonl(folder / "metrics.jsonl")] == [0, 1]


def test_a_damaged_run_id_is_refused(command, reference, tmp_path):
    folder = copied(reference, tmp_path / "run", 2)
    (folder / "run.json").write_text("{")
    assert "run.json is damaged" in command(f"resume={folder}", "--trust", code=5).err


CHANGES = {"vf_coef: 0.1": "vf_coef: 0.3", "cliprange: 0.2\n": "cliprange: 0.3\n"}


def test_a_config_changed_by_hand_is_refused_by_name_or_accepted(command, reference, tmp_path):
    folder = copied(reference, tmp_path / "run", 2)
    config = folder / "config.yaml"
    text = config.read_text()
    for before, after in CHANGES.items():
        assert before in text
        config.write_text(config.read_text().replace(before, after))
    there = tree(folder)
    ended = command(f"resume={folder}", code=5)
    assert "config.yaml is not what the run was last started with" in ended.err
    assert "  ppo.vf_coef: 0.1 -> 0.3\n" in ended.err
    assert "  ppo.cliprange: 0.2 -> 0.3\n" in ended.err
    assert "--accept-changes" in ended.err
    assert tree(folder) == there
    ended = command(f"resume={folder}", "--accept-changes", "--trust", "ppo.num_steps=2",
                    code=0)  # what was changed by hand is not signed
    assert "changed on resume: ppo.cliprange: 0.2 -> 0.3" in ended.err
    assert {change["key"] for change in read_changes(folder)} == {
        "ppo.num_steps", "ppo.vf_coef", "ppo.cliprange"}


def test_what_vanishes_from_a_run_is_put_back_or_said(command, reference, tmp_path):
    folder = copied(reference, tmp_path / "run", 3)
    (folder / "run.json").unlink()
    ended = command(f"resume={folder}", "--trust", code=0)
    assert "run.json was gone; the run's identity is that of its checkpoints" in ended.err
    (folder / "config.yaml").unlink()
    assert "has no config.yaml" in command(f"resume={folder}", code=5).err


def test_a_run_whose_folder_goes_away_says_so_once(command, world, monkeypatch):
    prune = retention.prune

    def lose(folder: Path, *given: int | None, newest: float) -> list[str]:
        shutil.rmtree(folder.parent, ignore_errors=True)
        return prune(folder, *given, newest=newest)

    monkeypatch.setattr(retention, "prune", lose)
    ended = command(*words("run_name=r"), code=6)
    assert ended.err.count("moved or deleted") == ended.err.lower().count("error") == 1
    assert not (world / "runs/r").exists()


@pytest.mark.parametrize(("words_", "code", "said"), [
    (["hardware.precision=bf16", "prompts.shuffle=false"], 5,
     ["fp32 -> bf16", "prompts.shuffle: true -> false"]),
    (["generation.max_new_tokens=5000"], 2, ["5000"])])
def test_a_refused_change_leaves_the_run_as_it_was(words_, code, said, command, reference,
                                                   tmp_path):
    folder = copied(reference, tmp_path / "run", 2)
    before = tree(folder)
    ended = command(f"resume={folder}", *words_, code=code)
    assert [part for part in said if part not in ended.err] == []
    assert tree(folder) == before


def test_a_finished_run_says_so_and_is_not_changed(command, reference, tmp_path):
    folder = whole_copy(reference, tmp_path / "run")
    before = tree(folder)
    ended = command(f"resume={folder}", code=0)
    assert "already finished (4/4 steps)" in ended.said
    assert ended.out.splitlines()[-1] == str(folder / "model")
    assert tree(folder) == before
    assert "already finished" in command(f"resume={folder}", "ppo.vf_coef=0.5", code=0).said
    assert tree(folder) == before


def test_a_finished_runs_missing_model_is_written_again(command, reference, tmp_path):
    folder = whole_copy(reference, tmp_path / "run")
    (folder / "model/model.safetensors").unlink()
    command(f"resume={folder}", code=0)
    assert_equal_runs(reference, folder)
