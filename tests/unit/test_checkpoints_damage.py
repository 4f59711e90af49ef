"""Every file of a step, harmed in every way, in the newest step and in all of them."""

import json
import os
import shutil
from pathlib import Path

import pytest
from checkpoint_samples import RUN, save, tree

from ppocli.errors import CheckpointError
from ppocli.runs import retention
from ppocli.runs.checkpoints import find_latest, open_checkpoint

FILES = ["MANIFEST.json", "state.json", "policy/model.safetensors", "policy/config.json",
         "rng.safetensors"]
HARMS = ["cut one byte", "half", "empty", "flip", "delete", "swap", "link", "html", "folder"]


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("good")
    save(folder, 9)
    save(folder, 10)
    return folder


@pytest.fixture
def folder(good: Path, tmp_path: Path) -> Path:
    """With two steps that may be harmed."""
    return shutil.copytree(good, tmp_path / "x" / "checkpoints")


@pytest.fixture
def newest(folder: Path) -> Path:
    return folder / "step-000010"


def harm_file(path: Path, harm: str, other: Path) -> None:
    data = path.read_bytes()
    written = {"cut one byte": data[:-1], "half": data[:len(data) // 2], "empty": b"",
               "flip": data[:-3] + bytes([data[-3] ^ 1]) + data[-2:], "swap": other.read_bytes(),
               "html": b"<html><body>404 Not Found</body></html>"}
    path.unlink()
    if harm in written:
        path.write_bytes(written[harm])
    elif harm == "link":
        aside = other.parent.parent.parent / "aside"
        aside.write_bytes(data)
        path.symlink_to(aside)
    elif harm == "folder":
        path.mkdir()


@pytest.mark.parametrize(("name", "harm"), [
    *((name, "flip") for name in FILES), *(("policy/model.safetensors", harm) for harm in HARMS
                                           if harm != "flip")])
def test_harm_to_the_newest_falls_back_and_says_so(folder: Path, newest: Path, name: str,
                                                   harm: str):
    other = folder / "step-000009"
    harm_file(newest / name, harm, other / name)
    before = tree(newest)
    search = find_latest(folder, run_id=RUN)
    assert search.checkpoint.path == other
    assert search.checkpoint.state["step"] == 9
    [line] = search.skipped
    assert line.startswith("skipped step-000010: ")
    assert name in line
    assert tree(newest) == before, "looking must not change anything"
    with pytest.raises(CheckpointError, match="step-000010 can't be used"):
        open_checkpoint(newest)


def test_every_bit_of_the_manifest_counts(folder: Path, newest: Path):
    path = newest / "MANIFEST.json"
    data = path.read_bytes()
    for position in range(0, len(data), 7):
        flipped = bytearray(data)
        flipped[position] ^= 1 << position % 8
        path.write_bytes(flipped)
        found = find_latest(folder, run_id=RUN, verify="size").checkpoint
        assert found.step == 9, f"byte {position}: {data[position:position + 1]!r}"


def test_size_verification_misses_only_what_it_says(folder: Path, newest: Path):
    weights = newest / "policy/model.safetensors"
    harm_file(weights, "flip", weights)
    assert find_latest(folder, run_id=RUN, verify="size").checkpoint.step == 10
    search = find_latest(folder, run_id=RUN, verify="full")
    assert search.checkpoint.step == 9
    assert search.skipped == ("skipped step-000010: policy/model.safetensors hash mismatch",)


def test_links_pipes_and_files_that_nobody_listed(folder: Path, newest: Path, tmp_path: Path):
    (newest / "weights.pt").write_bytes(b"x")
    assert find_latest(folder, run_id=RUN).skipped == (
        "skipped step-000010: weights.pt is not in MANIFEST.json",)
    (newest / "weights.pt").unlink()
    (newest / "policy").rename(tmp_path / "policy")
    (newest / "policy").symlink_to(tmp_path / "policy")
    assert find_latest(folder, run_id=RUN).skipped == ("skipped step-000010: policy is a link",)
    newest.rename(tmp_path / "moved")
    newest.symlink_to(tmp_path / "moved")
    os.mkfifo(folder / "step-000011")
    (folder / "step-000013").mkdir()
    search = find_latest(folder, run_id=RUN)
    assert search.checkpoint.step == 9
    assert [line.removeprefix("skipped ") for line in search.skipped] == [
        "step-000013: MANIFEST.json is missing", "step-000011: it is not a folder",
        "step-000010: the folder is a link"]


def rewrite_manifest(step: Path, change) -> None:
    """A manifest that is consistent in itself but says something it shouldn't."""
    body = json.loads((step / "MANIFEST.json").read_text())
    del body["digest"]
    change(body)
    (step / "MANIFEST.json").write_text(json.dumps(body | {"digest": retention._digest(body)}))


@pytest.mark.parametrize("name", [
    "/etc/hostname", "../step-000009/state.json", "policy/../state.json", "a//b", "", "C:/x",
    "a\\b", "model.PT", "x/optimizer.bin", "MANIFEST.json"])
def test_names_a_manifest_may_not_hold(folder: Path, newest: Path, name: str):
    rewrite_manifest(newest, lambda body: body["files"].update(
        {name: {"size": 1, "sha256": "0" * 64}}))
    search = find_latest(folder, run_id=RUN)
    assert search.checkpoint.step == 9
    assert repr(name) in search.skipped[0]


@pytest.mark.parametrize("change", [
    lambda body: body.update(files=[]), lambda body: body.update(files={"state.json": 3}),
    lambda body: body.update(step="10"), lambda body: body.update(run_id=None),
    lambda body: body["files"].pop("state.json"), lambda body: body.update(schema="1")])
def test_manifests_of_the_wrong_form(folder: Path, newest: Path, change):
    rewrite_manifest(newest, change)
    assert find_latest(folder, run_id=RUN).checkpoint.step == 9
