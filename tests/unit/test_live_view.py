"""The live view: what it shows at any size, when it draws, and what the modes leave out."""

import io
import logging
import os
import pty
import sys
from collections.abc import Callable

import pytest
from rich.text import Text
from terminal import Screen

from ppocli.publish.live_view import Dashboard, LiveView, open_display
from ppocli.training.console import Outlet


def row(step: int, **more: float | None) -> dict:
    return {"step": step, "reward/mean": step / 8, "reward/std": 0.1, "objective/kl": 2.0 * step,
            "rollout/response_tokens_mean": 8.0, "loss/policy_avg": 0.0, "loss/value_avg": 0.1,
            "policy/clipfrac_avg": 0.0, "lr": 1e-5, "time/rollout": 3.0, "time/reward": 0.5,
            "time/scoring": 0.5, "time/optimize": 6.0, "time/step": 10.0,
            "tokens_per_second/rollout": 9876.0, "tokens_per_second/optimize": 1_234_567.0,
            "memory/peak_mib": 600.0, **more}


@pytest.fixture
def now() -> list[float]:
    return [100.0]


@pytest.fixture
def board(now) -> Dashboard:
    board = Dashboard("night-run", clock=lambda: now[0])
    board.begin(20, [{"step": 0, "eval/reward_mean": 0.05, "time/eval": 3.0}])
    for step in range(1, 6):
        board.add_row(row(step))
    board.show([("the film", " was\tgood\x1b[2Jand 漢字漢字", 0.5),
                ("i saw", "it\nagain", None)], 5)
    return board


def test_every_figure_is_in_its_line(board, now):
    board.enter("optimize", ", update 1/3")
    now[0] += 4
    board.enter("optimize", ", update 2/3")
    text = "\n".join(line.plain for line in board.lines(100))
    for part in ("── training night-run ─", "step 5/20   25% ",
                 "now     optimize, update 2/3  0:04", "reward  ▁▃▅▇█",
                 "0.625  eval 0.050 (step 0)", "KL      ▁▃▅▇█", "10.00",
                 "samples of step 5", "  0.50  the film │ was good?[2Jand 漢字漢字",
                 "  none  i saw │ it ⏎ again"):
        assert part in text, (part, text)


@pytest.mark.parametrize("width", [10, 80, 300])
def test_lines_fit_any_width(board, width):
    board.enter("optimize", ", update 3/64")
    lines = board.lines(width)
    assert max(line.cell_len for line in lines) <= width
    assert all("\n" not in line.plain for line in lines)


def test_the_remaining_time_is_told_from_the_last_steps(now):
    board = Dashboard("r", clock=lambda: now[0])
    board.begin(100)
    assert board.left() is None
    for step in range(1, 31):  # slow at first, as with long responses
        board.add_row(row(step, **{"time/step": 100.0 if step <= 20 else 2.0}))
    assert board.left() == 70 * 2.0
    now[0] += 1.5
    assert board.left() == 70 * 2.0 - 1.5
    now[0] += 60  # this step takes longer than the others: no less is left than the rest
    assert board.left() == 69 * 2.0


# --- how it is drawn ------------------------------------------------------------------------

class Tty(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def outlet(monkeypatch) -> Outlet:
    """A console of 40 by 20 cells."""
    monkeypatch.setenv("TERM", "xterm")
    for name, value in (("COLUMNS", "40"), ("LINES", "20"), ("NO_COLOR", "1")):
        monkeypatch.setenv(name, value)
    return Outlet(Tty())


def seen(outlet: Outlet) -> list[str]:
    """What stands on the terminal; nothing but lines, moves and erasing has been sent to it."""
    screen = Screen(40)
    screen.feed(outlet.file.getvalue())
    assert screen.unknown == set()
    return screen.lines


class Lines(Dashboard):
    """A dashboard of these lines."""

    def __init__(self, *lines: str | None) -> None:
        super().__init__("r")
        self.texts = [*lines]

    def lines(self, width: int) -> list[Text]:
        return [Text(line) for line in self.texts]


def test_the_view_stays_below_what_is_printed(outlet):
    board = Lines("one", "two")
    with LiveView(outlet, board) as view:
        view.refresh()
        assert seen(outlet) == ["one", "two"]
        board.texts[1:] = ["three", "four"]
        view.refresh()
        assert seen(outlet) == ["one", "three", "four"]
        outlet.print(Text("a line"))
        assert seen(outlet) == ["a line", "one", "three", "four"]
    outlet.print(Text("after"))
    assert seen(outlet) == ["a line", "after", ""]


@pytest.mark.filterwarnings("ignore:.*multi-threaded:DeprecationWarning")
def test_what_a_reward_prints_goes_above(outlet, monkeypatch):
    monkeypatch.setattr(sys, "stdout", Tty())
    monkeypatch.setattr(sys, "stderr", Tty())
    with LiveView(outlet, Lines("view")):
        print("half", end="")
        assert seen(outlet) == ["view"]
        print(" a [bold]\x1b[2Jline", "\nand another\n", end="")
        assert seen(outlet) == ["half a [bold]line", "and another", "view"]
        if os.fork() == 0:  # where a lock of the console may be held for ever
            print("forked", file=sys.stderr, flush=True)
            os._exit(sys.stderr.rich_proxied_file.getvalue() != "forked\n")
        assert os.wait()[1] == 0
        print("rest", end="", file=sys.stderr)
    assert seen(outlet) == ["half a [bold]line", "and another", "rest", ""]
    assert isinstance(sys.stdout, Tty)


def test_nothing_is_drawn_in_the_background(outlet, monkeypatch):
    """And nothing of what stands there by then is erased."""
    foreground = [2**22 + 1]
    monkeypatch.setattr(os, "tcgetpgrp", lambda terminal: foreground[0])
    outlet.file.fileno = lambda: 1
    with LiveView(outlet, Lines("view")) as view:
        outlet.print("in the background")
        view.refresh()
        assert outlet.file.getvalue() == "in the background\n"
        foreground[0] = os.getpgrp()
        view.refresh()
        assert seen(outlet) == ["in the background", "view"]
    foreground[0] = os.getpgid(os.getppid())
    monkeypatch.setattr(os, "getpgrp", lambda: 2**22 + 1)
    with LiveView(outlet, Lines("mine"), started_by=os.getppid()):
        assert seen(outlet)[-1] == "mine"


# --- modes ----------------------------------------------------------------------------------

@pytest.fixture
def on_terminal(monkeypatch):
    """Runs a function with standard output on a pseudo terminal; gives what that got."""
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)

    def call(function: Callable[[], None]) -> str:
        ours, theirs = pty.openpty()
        with os.fdopen(theirs, "w", encoding="utf-8") as stream, monkeypatch.context() as patch:
            patch.setattr(sys, "stdout", stream)
            function()
            assert sys.stdout is stream  # put back
            print("END", flush=True)
            seen = b""
            while not seen.endswith(b"END\r\n"):
                seen += os.read(ours, 65536)
        os.close(ours)
        return seen.decode().replace("\r\n", "\n").removesuffix("END\n")

    return call


def show_a_step(tmp_path, mode: str) -> None:
    with open_display(tmp_path / "ppocli.log", mode) as display:
        display.start(0, 3)
        assert display.board is None
        display.step(row(1), 3)
        logging.getLogger("ppocli").warning("careful")


@pytest.mark.parametrize(("mode", "term"), [("lines", "xterm"), ("auto", "dumb"), ("auto", "")])
def test_plain_lines_where_asked_for_or_needed(mode, term, on_terminal, tmp_path, monkeypatch):
    monkeypatch.setenv("TERM", term)
    monkeypatch.setenv("COLUMNS", "200")
    seen = on_terminal(lambda: show_a_step(tmp_path, mode))
    assert seen.startswith(f"{FULL}\n")
    assert f"INFO {FULL}\n" in (tmp_path / "ppocli.log").read_text()
    assert "\x1b" not in seen
    assert "training" not in seen


FULL = ("step 1/3  reward 0.125±0.100  kl 2.00  len 8.0  loss 0.000/0.100  clip 0.00  lr 1.0e-05  "
        "10.0 s (rollout 3.0 reward 0.5 scoring 0.5 optimize 6.0, 9876 tokens/s)")
