"""A disk that is full: what is said, and that nothing older is lost."""

import subprocess
import sys

import pytest
from helpers import environment
from runs import assert_equal_runs, resumed, words


@pytest.mark.parametrize("fault", [
    "save.open@22+:enospc", *(pytest.param(fault, marks=pytest.mark.slow) for fault in (
        "save.before_manifest@2+:enospc", "save.before_rename@2+:enospc"))])
def test_a_disk_that_refuses_a_save_keeps_the_older_and_goes_on_later(
        fault, command, inject, reference, world):
    inject(fault)
    ended = command(*words("run_name=r", stateful=True), code=6)
    folder = world / "runs/r"
    assert "Disk full writing step 2 (needs " in ended.err
    assert "Kept step 1." in ended.err
    assert f"ppocli resume {folder}" in ended.err
    assert [path.name for path in sorted((folder / "checkpoints").glob("[!.l.b]*"))] == [
        "step-000001"]
    inject("")
    resumed(folder)
    assert_equal_runs(reference, folder)


def test_one_refusal_is_survived(command, inject, reference, world):
    """Superseded steps make room, and the save is tried once more."""
    inject("save.before_manifest@2:enospc")
    command(*words("run_name=r", stateful=True), code=0)
    assert_equal_runs(reference, world / "runs/r")


TMPFS = """\
mount -t tmpfs -o size={size}k tmpfs runs || exit 77
{python} -m ppocli train {words}
code=$?
cp -a runs kept
exit $code
"""


@pytest.mark.parametrize("size", [1200, *(pytest.param(n, marks=pytest.mark.slow)
                                          for n in (60, 300, 700, 1600))])
def test_a_disk_that_really_is_full(size, command, reference, world):
    (world / "runs").mkdir()
    script = TMPFS.format(size=size, python=sys.executable,
                          words=" ".join(words("run_name=r", stateful=True)))
    done = subprocess.run(["unshare", "-rm", "bash", "-c", script], cwd=world, text=True,
                          env=environment(), capture_output=True, timeout=200, check=False)
    if done.returncode == 77 or "unshare" in done.stderr:
        pytest.skip("no private mounts for ordinary users here")
    assert done.returncode == 6, (done.returncode, done.stderr)
    assert "Disk full writing" in done.stderr
    assert "Traceback" not in done.stderr
    kept = world / "kept/r"
    if not kept.exists():  # not even the start fitted
        assert list((world / "kept").iterdir()) == []
        return
    assert not list(kept.rglob(".staging*"))
    (world / "runs").rmdir()
    (world / "kept").rename(world / "runs")
    command(*words("run_name=r", "resume=auto", stateful=True), code=0)
    assert_equal_runs(reference, world / "runs/r")
