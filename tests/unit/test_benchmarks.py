"""The benchmarks' arithmetic, the section that they write, and one run of the smallest kind."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "benchmarks"))  # scripts, no package

from commands import CommandFailedError, environment, run  # noqa: E402
from compare import Outcome, Spread, fastest_peer, in_turn, ratio  # noqa: E402
from floor import floor_of  # noqa: E402
from report import Comparison, Section, comparison, keep, section  # noqa: E402
from systems import SYSTEMS, Places, Process, measure, rollouts, steps  # noqa: E402
from tables import write_between  # noqa: E402
from workloads import WORKLOADS  # noqa: E402


def process(*wall: float, processor: float = 1.0) -> Process:
    return Process(list(wall), [processor] * len(wall), [100.0], 32.0, 500.0, None, 9.0, {})


def test_ratios_are_taken_round_by_round_from_median_iterations():
    slow = Outcome([process(4.0, 4.0, 100.0), process(9.0, 9.0, 9.0), process(5.0, 5.0, 5.0)])
    fast = Outcome([process(2.0, 2.0, 2.0), process(3.0, 3.0, 50.0), process(1.0, 1.0, 1.0)])
    assert ratio(slow, fast, "wall") == Spread(3.0, 2.0, 5.0)
    assert str(Spread(2.345, 2.0, 123.4)) == "2.35 (2 to 123)"
    assert str(Spread.of([1.5])) == "1.5"


def test_the_fastest_peer_is_one_that_somebody_could_train_with():
    assert not SYSTEMS["experimental-free"].real
    found = {"ours": Outcome([process(1.0)]), "classic": Outcome([process(3.0)]),
             "experimental-free": Outcome([process(2.0)]), "trlx": Outcome([], "no wheel")}
    assert fastest_peer(found, "wall") == "classic"
    assert fastest_peer({"ours": found["ours"], "trlx": found["trlx"]}, "wall") is None


def test_systems_take_turns_and_one_that_failed_is_told_and_not_tried_again(capsys):
    asked = []

    def once(name: str, number: int) -> Process:
        asked.append((number, name))
        if name == "trlx":
            raise CommandFailedError("no wheel")
        return process(1.0)

    found = in_turn(["ours", "trlx", "classic"], 3, once)
    assert asked == [(0, "ours"), (0, "trlx"), (0, "classic"), (1, "classic"), (1, "ours"),
                     (2, "classic"), (2, "ours")]
    assert found["trlx"] == Outcome([], "no wheel")
    assert len(found["ours"].rounds) == len(found["classic"].rounds) == 3
    assert "trlx failed: no wheel" in capsys.readouterr().err


def test_an_iteration_is_the_time_between_two_scored_rollouts():
    def stamp(at: float, samples: int, tokens: int) -> dict:
        return {"wall": at, "samples": samples, "tokens": tokens}

    # in two calls, in one, and the single sample of an evaluation
    stamps = [stamp(1, 2, 10), stamp(2, 2, 5), stamp(7, 4, 20), stamp(9, 4, 7), stamp(9.5, 1, 1)]
    found = rollouts(stamps, 4)
    assert [one["tokens"] for one in found] == [15, 20, 7]
    assert steps(found, "wall") == [5, 2]


def test_the_floor_of_a_model_of_one_weight():
    work = replace(WORKLOADS["tiny"], batch=2, mini_batch=1, epochs=1)
    facts = {"layers": 1, "width": 1, "body": 1, "head": 1, "parameters": 2}
    found = floor_of(work, facts, prompt_tokens=2, new_tokens=2, gemm=1.0, bandwidth=1e9)
    # 3 tokens are fed: 2 operations for the weight, 4 * 3 / 2 for attention; the head twice
    assert found.reference == 2 * (3 * (2 + 6) + 2 * 2)
    assert found.optimize == found.optimize_flops == 3 * found.reference
    assert found.adam == pytest.approx(2 * 7 * 2 * 4 / 1e9)
    assert found.total == pytest.approx(5 * found.reference + found.adam)


def test_a_section_is_replaced_between_its_marks_and_nothing_else(tmp_path):
    page = tmp_path / "R.md"
    page.write_text("a\n<!-- speed: begin -->\nold\n<!-- speed: end -->\nz\n", encoding="utf-8")
    write_between(page, "speed", "new\n")
    assert page.read_text(encoding="utf-8") == \
        "a\n<!-- speed: begin -->\nnew\n\n<!-- speed: end -->\nz\n"
    for wrong in ("no marks", "<!-- speed: end --><!-- speed: begin -->",
                  "<!-- speed: begin --><!-- speed: begin --><!-- speed: end -->"):
        page.write_text(wrong, encoding="utf-8")
        with pytest.raises(SystemExit, match="once each"):
            write_between(page, "speed", "new")
        assert page.read_text(encoding="utf-8") == wrong


def test_what_is_kept_comes_back_and_missing_peers_are_said(tmp_path):
    found = Comparison("tiny", 1, "today", "python x", {"ours": "1"}, {
        "ours": Outcome([process(1.0, processor=2.0)]),
        "classic": Outcome([process(3.0, processor=5.0)]), "trlx": Outcome([], "a\nno `wheel`")})
    keep(tmp_path, "tiny-1", found)
    keep(tmp_path, "memory-1", Section("Memory", "today", "python y", "flat"))
    text = section(tmp_path)
    assert comparison(found) in text
    assert "| TRL experimental | not run |" in text
    assert "| trlX | failed |" in text
    assert "trlX failed: `no 'wheel'`" in text
    assert "| 4 layers, 256 wide | 1 | 2.5, TRL classic | 3, TRL classic |" in text
    assert text.endswith("### Memory\n\nflat\n\n`python y`\n\ntoday")


def test_a_command_that_fails_says_its_last_words(tmp_path):
    with pytest.raises(CommandFailedError, match="code 3:\nwhy"):
        run(["/bin/sh", "-c", "echo why; exit 3"], tmp_path / "log", environment(1))
    with pytest.raises(CommandFailedError, match="can't be started"):
        run([str(tmp_path / "absent")], tmp_path / "log", environment(1))


@pytest.mark.long
def test_ours_is_measured_as_a_whole_run(tmp_path):
    work = replace(WORKLOADS["tiny"], batch=4, mini_batch=2, new_tokens=4, epochs=1, warmup=0,
                   iterations=2)
    took = measure("ours", work, Places(tmp_path, tmp_path, {}), threads=1, seed=0)
    assert len(took.wall) == len(took.processor) == 2
    assert took.tokens == 4
    assert 0 < sum(took.wall) < took.seconds
    assert took.peak_mib >= max(took.resident) - 1 > 50
    # the optimize phases of the first two steps lie between the three rewards
    for kind, whole in (("time", took.wall), ("cpu", took.processor)):
        inside = took.phases[f"{kind}/optimize"]
        assert len(inside) == 3
        assert 0 < sum(inside[:2]) < sum(whole)
    assert not list(tmp_path.glob("run-*"))
