"""Damaged, foreign, hostile and missing checkpoints; two processes; changed settings."""

from __future__ import annotations

import json
import os
import pickle
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from runs import assert_equal_runs, copied, spawn, wait_for, whole_copy, words

FILES = ["policy/model.safetensors", "policy/config.json", "value_head.safetensors",
         "optimizer.safetensors", "rng.safetensors", "rng.json", "state.json", "MANIFEST.json"]


def flip(path: Path) -> None:
    raw = bytearray(path.read_bytes())
    raw[len(raw) // 2] ^= 1
    path.write_bytes(raw)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def empty(path: Path) -> None:
    path.write_bytes(b"")


def link(path: Path) -> None:
    aside = path.with_name("aside")
    path.rename(aside)
    path.symlink_to("aside")


def page(path: Path) -> None:
    path.write_text("<!doctype html><title>404</title>")


DAMAGES = {"flip": flip, "cut": cut, "empty": empty, "delete": Path.unlink, "link": link,
           "page": page}
QUICK = {("policy/model.safetensors", "flip"), ("optimizer.safetensors", "cut"),
         ("state.json", "delete"), ("MANIFEST.json", "page")}


@pytest.mark.parametrize(("name", "damage"), [
    pytest.param(name, damage, marks=() if (name, damage) in QUICK else pytest.mark.slow)
    for name in FILES for damage in DAMAGES])
def test_a_damaged_checkpoint_is_named_and_an_older_one_taken(name, damage, command, reference,
                                                              tmp_path):
    folder = copied(reference, tmp_path / "run", 3)
    DAMAGES[damage](folder / "checkpoints/step-000003" / name)
    ended = command(f"resume={folder}")
    assert ended.code == 0, ended.said
    assert "skipped step-000003: " in ended.err
    assert name in ended.err
    assert "resuming step 2 of 4" in ended.out
    assert_equal_runs(reference, folder)


def test_with_every_checkpoint_damaged_the_run_is_refused_and_kept(command, reference, tmp_path):
    folder = copied(reference, tmp_path / "run", 2)
    for step in (1, 2):
        flip(folder / f"checkpoints/step-00000{step}/policy/model.safetensors")
    before = tree(folder)
    ended = command(f"resume={folder}")
    assert ended.code == 5
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
    ended = command(f"resume={folder}")
    assert ended.code == 5
    assert "resume=auto" in ended.err
    assert tree(folder) == before
    own = reference.parents[1]
    ended = command(*words("run_name=r", "resume=auto", f"model.path={own}/lm",
                           f"prompts.path={own}/prompts.jsonl", stateful=True))
    assert ended.code == 0, ended.said
    assert "the run starts from the beginning" in ended.said
    assert_equal_runs(reference, folder)


def test_a_folder_that_is_no_run_or_is_missing_is_refused(command, world):
    for given in (".", "runs/nowhere", "prompts.jsonl"):
        ended = command(f"resume={given}")
        assert ended.code == 5, ended.said
        assert "Traceback" not in ended.said


def test_checkpoints_of_another_run_are_refused(command, reference, tmp_path):
    folder = copied(reference, tmp_path / "run", 2)
    (folder / "run.json").write_text('{"run_id": "0123456789abcdef"}')
    before = tree(folder)
    ended = command(f"resume={folder}")
    assert ended.code == 5
    assert "belongs to run" in ended.err
    assert tree(folder) == before


def test_a_damaged_run_id_is_refused(command, reference, tmp_path):
    folder = copied(reference, tmp_path / "run", 2)
    (folder / "run.json").write_text("{")
    ended = command(f"resume={folder}")
    assert ended.code == 5
    assert "run.json is damaged" in ended.err


class _Payload:
    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self):
        return os.system, (f"touch {self.mark}",)


@pytest.mark.parametrize("name", ["optimizer.pt", "policy/pytorch_model.bin", "state.pkl"])
def test_a_pickle_in_a_checkpoint_is_refused_unread(name, command, reference, tmp_path):
    folder = copied(reference, tmp_path / "run", 1)
    mark = tmp_path / "executed"
    step = folder / "checkpoints/step-000001"
    (step / name).write_bytes(pickle.dumps(_Payload(mark)))
    ended = command(f"resume={folder}")
    assert ended.code == 5
    assert name in ended.err
    assert not mark.exists()


def forged(step: Path, change) -> None:
    """Change a manifest and give it a digest that holds: an attacker can do that too."""
    from ppocli.storage import manifest

    path = step / "MANIFEST.json"
    body = json.loads(path.read_text())
    del body["digest"]
    change(body)
    path.write_text(json.dumps(body | {"digest": manifest._digest(body)}))


@pytest.mark.parametrize(("name", "said"), [
    ("../../../secret.json", "leaves its folder"), ("/etc/hostname", "is absolute"),
    ("optimizer.pt", "pickle")])
def test_a_forged_manifest_is_refused(name, said, command, reference, tmp_path):
    folder = copied(reference, tmp_path / "run", 1)
    forged(folder / "checkpoints/step-000001",
           lambda body: body["files"].update({name: {"size": 1, "sha256": "0" * 64}}))
    ended = command(f"resume={folder}")
    assert ended.code == 5
    assert said in ended.err


def test_a_step_that_is_a_link_is_refused(command, reference, tmp_path):
    folder = copied(reference, tmp_path / "run", 1)
    step = folder / "checkpoints/step-000001"
    step.rename(tmp_path / "elsewhere")
    step.symlink_to(tmp_path / "elsewhere")
    ended = command(f"resume={folder}")
    assert ended.code == 5
    assert "is a link" in ended.err


def test_a_newer_schema_names_both_versions_and_does_not_go_back(command, reference, tmp_path):
    folder = copied(reference, tmp_path / "run", 2)
    forged(folder / "checkpoints/step-000002",
           lambda body: body.update(schema=99, ppocli="9.1"))
    ended = command(f"resume={folder}")
    assert ended.code == 5
    assert "9.1" in ended.err
    assert (folder / "checkpoints/step-000002").is_dir()


@pytest.mark.parametrize(("word", "line"), [
    ("hardware.precision=bf16", "fp32 -> bf16"),
    ("ppo.optimizer.name=sgd", "adamw -> sgd"), ("seed=3", "seed: 0 -> 3")])
def test_a_changed_part_of_the_saved_state_is_refused_with_a_list(word, line, command, reference,
                                                                  tmp_path):
    folder = copied(reference, tmp_path / "run", 2)
    before = tree(folder)
    ended = command(f"resume={folder}", word, "prompts.shuffle=false")
    assert ended.code == 5, ended.said
    assert line in ended.err
    assert "prompts.shuffle: true -> false" in ended.err
    assert tree(folder) == before


def test_another_model_is_refused_by_name(command, reference, tmp_path):
    from helpers import save_lm

    folder = copied(reference, tmp_path / "run", 2)
    ended = command(f"resume={folder}", f"model.path={save_lm(tmp_path / 'other', seed=9)}")
    assert ended.code == 5
    assert "model.path: " in ended.err


def test_a_model_that_changed_in_its_place_is_refused(command, reference, tmp_path):
    """The folder has kept its name, but other shapes are in it now."""
    from helpers import save_lm

    folder = copied(reference, tmp_path / "run", 2)
    config = (folder / "config.yaml").read_text()
    other = save_lm(tmp_path / "other", n_embd=16)
    (folder / "config.yaml").write_text(config.replace(
        next(line for line in config.splitlines() if line.strip().startswith("path:")),
        f"  path: {other}", 1))
    ended = command(f"resume={folder}")
    assert ended.code == 5
    assert "Not what the run was started with: reference model" in ended.err


def test_harmless_changes_are_listed_and_more_episodes_go_on(command, reference, tmp_path):
    folder = whole_copy(reference, tmp_path / "run")
    ended = command(f"resume={folder}", "ppo.num_steps=6", "eval.every_steps=1",
                    "ppo.optimizer.lr=1e-4")
    assert ended.code == 0, ended.said
    for line in ("changed on resume: ppo.num_steps: 4 -> 6",
                 "changed on resume: eval.every_steps: 2 -> 1",
                 "changed on resume: ppo.optimizer.lr: 0.001 -> 0.0001 (from here on"):
        assert line in ended.err, ended.err
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [0, 1, 2, 3, 4, 5, 6]
    assert json.loads((folder / "summary.json").read_text())["steps"] == 6


def test_a_finished_run_says_so(command, reference, tmp_path):
    folder = whole_copy(reference, tmp_path / "run")
    before = tree(folder)
    ended = command(f"resume={folder}")
    assert ended.code == 0
    assert "already finished (4/4 steps)" in ended.said
    assert ended.out.splitlines()[-1] == str(folder / "model")
    assert tree(folder) == before


@pytest.mark.parametrize("missing", ["model/model.safetensors", "model"])
def test_a_finished_runs_missing_model_is_written_again(missing, command, reference, tmp_path):
    folder = whole_copy(reference, tmp_path / "run")
    path = folder / missing
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink()
    ended = command(f"resume={folder}")
    assert ended.code == 0, ended.said
    assert_equal_runs(reference, folder)


def test_a_second_process_on_the_folder_is_refused_with_its_pid(command, world, inject):
    process = spawn("train", *words("run_name=r"), cwd=world,
                    PPOCLI_FAULTS="rollout.token@60:sleep=60")
    try:
        wait_for((world / "runs/r/checkpoints/step-000001").exists, process)
        ended = command(f"resume={world / 'runs/r'}")
        assert ended.code == 5
        assert f"in use by process {process.pid} on {socket.gethostname()}" in ended.err
    finally:
        process.kill()
        process.communicate()
    # what it left names a dead process: taken over
    assert str(process.pid) in (world / "runs/r/.lock").read_text()
    assert command(f"resume={world / 'runs/r'}").code == 0


@pytest.mark.slow
def test_two_runs_of_the_same_second_lie_apart(world):
    """Two commands at once, without run_name."""
    pair = [spawn("train", *words("ppo.num_steps=1"), cwd=world) for _ in range(2)]
    ended = [process.communicate(timeout=200) for process in pair]
    assert [process.returncode for process in pair] == [0, 0], ended
    folders = {out.splitlines()[-1] for out, _ in ended}
    assert len(folders) == 2
    assert all(Path(folder, "config.json").is_file() for folder in folders)


def test_a_moved_run_goes_on_where_it_is(command, reference, tmp_path):
    folder = tmp_path / "with space ü"
    copied(reference, tmp_path / "made here", 3).rename(folder)
    ended = command(f"resume={folder}")
    assert ended.code == 0, ended.said
    assert_equal_runs(reference, folder)


def test_the_deadly_payload_is_deadly(tmp_path):
    """The pickle of the tests above does run when something loads it."""
    mark = tmp_path / "executed"
    code = f"import pickle; pickle.loads({pickle.dumps(_Payload(mark))!r})"
    subprocess.run([sys.executable, "-c", code], check=True)
    assert mark.exists()
