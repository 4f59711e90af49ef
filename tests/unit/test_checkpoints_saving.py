"""Steps that are saved, found, kept and deleted."""

import json
import os
from pathlib import Path

import pytest
from checkpoint_samples import RUN, names, save, tree, write_files

from ppocli.errors import CheckpointError
from ppocli.runs import retention
from ppocli.runs.checkpoints import best_step, find_latest, open_checkpoint
from ppocli.runs.retention import check_folder, prune, update_pointers


def test_save_then_find_gives_back_state_and_files(tmp_path: Path):
    folder = tmp_path / "run" / "checkpoints"
    path = save(folder, 120)
    assert path == folder / "step-000120"
    assert sorted(tree(path)) == ["MANIFEST.json", "policy/config.json",
                                  "policy/model.safetensors", "rng.safetensors", "state.json"]
    search = find_latest(folder, run_id=RUN)
    assert search.skipped == ()
    assert search.checkpoint.path == path
    assert search.checkpoint.step == 120
    assert search.checkpoint.state == {"step": 120, "cursor": 960, "big": 2**100 + 120}
    assert check_folder(path).config_digest == "c0ffee"
    assert search.checkpoint.versions == {"torch": "2.13.0"}
    assert list(folder.iterdir()) == [path], "staging or temporary files were left"


@pytest.mark.parametrize(("state", "digest"), [({"step": 3, "evaluated": True}, "c0ffee"),
                                               ({"step": 3}, "other")])
def test_saving_a_step_in_another_state_replaces_it(tmp_path: Path, state: dict, digest: str):
    save(tmp_path, 3, write=write_files(1), state={"step": 3})
    save(tmp_path, 3, write=write_files(2), state=state, digest=digest)
    found = find_latest(tmp_path, run_id=RUN).checkpoint
    assert (found.state, check_folder(found.path).config_digest) == (state, digest)
    assert json.loads((found.path / "policy" / "config.json").read_text()) == {"step": 2}
    assert names(tmp_path) == ["step-000003"]


@pytest.mark.parametrize("harm", ["damage", "link", "file", "other run"])
def test_saving_over_an_invalid_step_replaces_it(tmp_path: Path, harm: str):
    folder, outside = tmp_path / "c", tmp_path / "outside"
    path = save(folder, 3, run_id="other" if harm == "other run" else RUN)
    if harm == "damage":
        (path / "rng.safetensors").write_bytes(b"")
    elif harm == "link":
        path.rename(outside)
        path.symlink_to(outside)
    elif harm == "file":
        path.rename(outside)
        path.write_text("not a folder")
    save(folder, 3)
    assert find_latest(folder, run_id=RUN).checkpoint.step == 3
    assert names(folder) == ["step-000003"]
    assert not outside.exists() or len(tree(outside)) == 5, "a link's target was touched"


def test_an_exception_in_write_leaves_nothing(tmp_path: Path):
    save(tmp_path, 1)
    calls = []

    def write(staging: Path) -> None:
        calls.append(staging)
        (staging / "half").write_text("x")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        save(tmp_path, 2, write=write)
    assert len(calls) == 1, "only a failing disk is tried again"
    assert names(tmp_path) == ["step-000001"]


def test_prune_keeps_the_newest_and_the_best(tmp_path: Path):
    for step in range(1, 8):
        save(tmp_path, step)
    assert prune(tmp_path, 2, 3) == []
    assert names(tmp_path) == ["step-000003", "step-000006", "step-000007"]


def test_prune_does_not_count_damaged_steps_as_kept(tmp_path: Path):
    for step in range(1, 6):
        save(tmp_path, step)
    for step in (1, 4, 5):
        (tmp_path / f"step-{step:06d}" / "state.json").unlink()
    assert prune(tmp_path, 1, None) == []
    assert names(tmp_path) == ["step-000003", "step-000004", "step-000005"]
    (tmp_path / "step-000003" / "state.json").unlink()
    assert prune(tmp_path, 1, None) == []
    assert len(names(tmp_path)) == 3, "nothing is deleted while nothing is valid"


def test_prune_leaves_links_and_their_targets_alone(tmp_path: Path):
    folder = tmp_path / "c"
    for step in (1, 2, 3):
        save(folder, step)
    (folder / "step-000001").rename(tmp_path / "elsewhere")
    (folder / "step-000001").symlink_to(tmp_path / "elsewhere")
    assert prune(folder, 1, None) == ["step-000001 is a link and was left alone"]
    assert names(folder) == ["step-000001", "step-000003"]
    assert len(tree(tmp_path / "elsewhere")) == 5


def test_a_later_step_that_could_not_be_loaded_does_not_count_as_kept(tmp_path: Path):
    for step in (2, 3, 4):
        save(tmp_path, step)
    assert prune(tmp_path, 1, newest=3) == []
    assert names(tmp_path) == ["step-000003", "step-000004"]


def test_links_are_for_people_and_the_checkpoints_say_what_is_best(tmp_path: Path):
    folder = tmp_path / "c"
    for step, best in ((1, 1), (2, 2), (3, 2)):
        save(folder, step, state={"best": {"step": best, "metric": 0.5}})
    assert update_pointers(folder, latest=1, best=1) == []
    assert os.readlink(folder / "latest") == "step-000001"
    assert update_pointers(folder, latest=3, best=2) == []
    assert os.readlink(folder / "latest") == "step-000003"
    assert open_checkpoint(folder / "latest").step == 3
    assert open_checkpoint(folder / "best").step == best_step(folder) == 2
    update_pointers(folder, latest=3, best=9)
    assert not (folder / "best").is_symlink()
    (folder / "step-000003/state.json").write_text('{"best": {"step": 1}}')
    assert best_step(folder) == 2, "the newest that holds says so"
    retention.discard(folder / "step-000002")
    assert best_step(folder) == 1
    (longest := folder / ("ü" * 127)).mkdir()
    retention.discard(longest)
    assert not longest.exists()


def test_explicit_checkpoints_load_or_are_refused(tmp_path: Path):
    save(tmp_path, 3)
    assert open_checkpoint(tmp_path / "step-000003").state["step"] == 3
    with pytest.raises(CheckpointError, match="step-000004 can't be used: it is not a fol") as no:
        open_checkpoint(tmp_path / "step-000004")
    assert "step-000003" in no.value.fix
    (tmp_path / "step-000003").rename(tmp_path / "my-copy")
    assert open_checkpoint(tmp_path / "my-copy").step == 3
    (tmp_path / "my-copy" / "state.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"state\.json has 2 bytes") as no:
        open_checkpoint(tmp_path / "my-copy")
    assert no.value.exit_code == 5


def test_another_runs_checkpoint_is_skipped(tmp_path: Path):
    save(tmp_path, 3)
    save(tmp_path, 4, run_id="other")
    search = find_latest(tmp_path, run_id=RUN)
    assert search.checkpoint.step == 3
    assert search.skipped == ("skipped step-000004: it belongs to run 'other', not 'run-1'",)
    assert find_latest(tmp_path, run_id=None).checkpoint.step == 4


def test_a_newer_schema_is_not_silently_passed_over(tmp_path: Path):
    save(tmp_path, 3)
    newer = save(tmp_path, 4) / "MANIFEST.json"
    body = json.loads(newer.read_text())
    del body["digest"]
    body |= {"schema": 2, "ppocli": "9.9.9"}
    newer.write_text(json.dumps(body | {"digest": retention._digest(body)}))
    with pytest.raises(CheckpointError, match=r"written by ppocli 9\.9\.9, this is 0\."):
        find_latest(tmp_path, run_id=RUN)
    body["schema"] = 0
    newer.write_text(json.dumps(body | {"digest": retention._digest(body)}))
    search = find_latest(tmp_path, run_id=RUN)
    assert search.checkpoint.step == 3
    assert search.skipped == ("skipped step-000004: MANIFEST.json has the unknown schema 0",)
