"""``ppocli watch``: runs that begin, go on, are resumed, end in every way; pipes and terminals."""

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import pytest
from helpers import environment, jsonl, read_json
from runs import Command, copied, wait_for, whole_copy

from ppocli.cli.output import code_of
from ppocli.cli.runs import watch
from ppocli.runs.run_folder import _myself


@pytest.fixture
def finished(reference: Path, here: Path) -> Path:
    """``runs/done`` of the current folder, a finished run."""
    return whole_copy(reference, here / "runs/done")


@pytest.fixture
def look(app: Command) -> Callable[..., tuple[list[str], str]]:
    """``ppocli watch`` of a run that has ended: lines, messages."""
    def look(*given: str, code: int = 0) -> tuple[list[str], str]:
        ended = app("watch", *given, code=code)
        return ended.out.splitlines(), ended.err

    return look


def steps_in(out: list[str]) -> list[str]:
    return [line.split()[1] for line in out if line.startswith("step")]


def begin(run: Path) -> Path:
    """Turn a run's folder into one that has only just begun."""
    for path in run.iterdir():
        if path.name not in ("config.yaml", ".lock"):
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    return run


def hold(run: Path) -> None:
    """Let this process be the one that works in the folder."""
    (run / ".lock").write_text(json.dumps(asdict(_myself())))


class Watched:
    """``watch`` in a thread, on a run that this process plays."""

    def __init__(self, capsys: pytest.CaptureFixture[str], run: Path, as_json: bool = False
                 ) -> None:
        self._capsys, self._run, self.out, self.err = capsys, run, "", ""
        self.code: int | None = None

        def call() -> None:
            self.code = code_of(lambda: watch(
                str(run), interval=0.1, from_start=False, plain=True, as_json=as_json))

        self._thread = threading.Thread(target=call, daemon=True)
        self._thread.start()

    def wait_for(self, condition: Callable[[], bool]) -> None:
        def met() -> bool:
            self.read()
            return condition()

        wait_for(met, seconds=30)

    def read(self) -> None:
        out, err = self._capsys.readouterr()
        self.out += out
        self.err += err

    def end(self) -> None:
        """The run's process ends."""
        (self._run / ".lock").write_text("")
        self._thread.join(timeout=30)
        self.read()
        assert self.code is not None


def test_a_finished_run_shows_its_last_steps_and_how_it_ended(finished, look):
    out, err = look("done")
    log = [line.split(" INFO ", 1)[1] for line in (finished / "ppocli.log").read_text().splitlines()
           if " INFO step " in line or " INFO eval at" in line]
    assert out == log[-len(out):]
    assert steps_in(out) == ["1/4", "2/4", "3/4", "4/4"]
    assert err.startswith("runs/done finished: 4 steps, reward ")
    assert err.endswith("; model: runs/done/model\n")


def test_from_start_shows_every_step_and_json_the_rows(finished, look):
    rows = jsonl(finished / "metrics.jsonl")
    with (finished / "metrics.jsonl").open("a") as file:
        file.writelines(json.dumps({**rows[-1], "step": step}) + "\n" for step in range(5, 20))
    assert len(steps_in(look("runs/done")[0])) == 5
    out, _ = look("--json", "--from-start")
    assert [json.loads(line) for line in out] == jsonl(finished / "metrics.jsonl")


def test_every_end_has_its_words_and_the_way_on(finished, reference, tmp_path, look):
    summary = read_json(finished / "summary.json")
    for change, said in (
            ({"status": "stopped"}, "runs/done was stopped at step 4 of 4; resume with: ppocli "
                                    "resume runs/done\n"),
            ({"status": "failed", "error": "no \x1b[2Jdisk\nat all\n  fix:   buy one"},
             "runs/done failed at step 4 of 4: no \\x1b[2Jdisk\n  at all\n  fix:   buy one\n"
             "  log:   runs/done/ppocli.log\n  resume with: ppocli resume runs/done\n")):
        (finished / "summary.json").write_text(json.dumps({**summary, **change}))
        assert look("runs/done")[1] == said
    copied(reference, tmp_path / "runs/killed", 2)
    assert look("killed")[1] == (
        "runs/killed was interrupted at step 4 of 4: its process is gone; resume with: ppocli "
        "resume runs/killed\n")
    begin(finished)
    os.utime(finished / "config.yaml", (1e9, 1e9))
    assert look("done")[1] == "runs/done ended before its first step\n"


def test_a_run_that_has_just_begun_is_waited_for_and_followed(finished, capsys):
    lines = (finished / "metrics.jsonl").read_text().splitlines(keepends=True)
    run = begin(finished)
    hold(run)
    one = Watched(capsys, run)
    one.wait_for(lambda: "waiting for the first step" in one.err)
    metrics = run / "metrics.jsonl"
    metrics.write_text(lines[0] + lines[1][:50])  # a line that is still being written
    one.wait_for(lambda: "eval at step 0" in one.out)
    assert "step 1/4" not in one.out
    metrics.write_text("".join(lines[:3]))
    (run / "ppocli.log").write_text("2026-01-01 12:00:00,000 WARNING the KL is\nhigh\n"
                                    "2026-01-01 12:00:00,001 INFO on\n")
    one.wait_for(lambda: "step 2/4" in one.out and "warning: the KL is\nhigh\n" in one.err)
    assert one.out.count("step 1/4") == 1
    with metrics.open("a") as file:
        file.write("".join(lines[3:]))
    one.end()  # the rows before the end are not lost
    assert one.code == 0
    assert steps_in(one.out.splitlines()) == ["1/4", "2/4", "3/4", "4/4"]
    assert "on\n" not in one.err.replace("warning", "")
    assert "was interrupted at step 4 of 4" in one.err


def test_a_resumed_run_repeats_nothing_that_stayed(finished, capsys):
    lines = (finished / "metrics.jsonl").read_text().splitlines(keepends=True)
    hold(finished)
    one = Watched(capsys, finished, as_json=True)
    one.wait_for(lambda: '"step": 4' in one.out)
    kept = finished / "kept"
    kept.write_text("".join(lines[:3]))
    os.replace(kept, finished / "metrics.jsonl")
    one.wait_for(lambda: "resumed at step 2" in one.err)
    with (finished / "metrics.jsonl").open("a") as file:
        file.write(lines[3])
    one.wait_for(lambda: one.out.count('"step": 3') == 2)
    one.end()
    assert [json.loads(line)["step"] for line in one.out.splitlines()] == [0, 1, 2, 3, 4, 3]


def test_ctrl_c_leaves_quietly_and_the_run_alone(finished):
    hold(finished)
    before = {path: path.stat().st_mtime_ns for path in finished.rglob("*")}
    process = subprocess.Popen([sys.executable, "-m", "ppocli", "watch"], text=True,
                               stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment())
    assert process.stderr.readline() == "watching runs/done, the newest run\n"
    while not process.stdout.readline().startswith("eval at step 4"):
        pass
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=30)
    assert (process.returncode, out, err) == (130, "", "")
    assert before == {path: path.stat().st_mtime_ns for path in finished.rglob("*")}
