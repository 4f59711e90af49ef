"""Pictures of what a person sees, to be looked at: the live view of a run in terminals of 80 and
120 columns, the report of that run, and the front page of the docs where they are built.

    python docs/screenshots.py FOLDER [--site site]

Needs a Chromium that is installed already, and the extra ``browser``.
"""

import argparse
import fcntl
import io
import os
import pty
import select
import shutil
import struct
import subprocess
import sys
import termios
import time
from pathlib import Path
from typing import Any

import pyte
from playwright.sync_api import Browser, sync_playwright
from rich.console import Console
from rich.text import Text

COMMAND = [sys.executable, "-m", "ppocli"]
RUN = ["train", "+recipe=quickstart", "run_name=first"]
LINES = 44
SEEN = "step 12/44"
"""what the live view shows when its picture is taken"""
WIDTHS = {"phone": 500, "laptop": 1280, "wide": 1920}
PATIENCE = 300.0
"""seconds until the run has come that far"""


def watch_run(columns: int, folder: Path) -> list[Text]:
    """The rows of a terminal in which a run is shown, once it has come to ``SEEN``; it ends then,
    unless the terminal is the last one that is asked for: its run goes to its end.

    Raises:
        SystemExit: the run ended before.
    """
    screen = pyte.Screen(columns, LINES)
    stream = pyte.ByteStream(screen)
    pid, terminal = pty.fork()
    if pid == 0:
        os.chdir(folder)
        os.execve(COMMAND[0], [*COMMAND, *RUN], {
            **os.environ, "TERM": "xterm-256color", "COLUMNS": str(columns), "LINES": str(LINES),
            "HF_HUB_OFFLINE": "1"})
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", LINES, columns, 0, 0))
    deadline, rows = time.monotonic() + PATIENCE, list[Text]()
    while time.monotonic() < deadline:
        if not select.select([terminal], [], [], 0.5)[0]:
            continue
        try:
            stream.feed(os.read(terminal, 65536))
        except OSError:  # the run has ended
            break
        shown = "\n".join(screen.display)
        if not rows and SEEN in shown and "samples of step" in shown:
            rows = [_row(screen.buffer[number], columns) for number in range(LINES)]
    os.waitpid(pid, 0)
    if not rows:
        raise SystemExit(f"the run never showed {SEEN}:\n" + "\n".join(screen.display))
    return rows


def _row(cells: Any, columns: int) -> Text:
    row = Text()
    for column in range(columns):
        cell = cells[column]
        colour = cell.fg if cell.fg.isalpha() else f"#{cell.fg}"
        row.append(cell.data, " ".join(filter(None, (
            "bold" if cell.bold else "", {"default": "", "brown": "yellow"}.get(colour, colour)))))
    return row


def terminal_page(rows: list[Text], columns: int) -> str:
    """A page with a terminal that shows these rows."""
    console = Console(record=True, width=columns, file=io.StringIO(), force_terminal=True,
                      color_system="truecolor", highlight=False)
    for row in rows:
        console.print(row, no_wrap=True, overflow="crop")
    return f"<!DOCTYPE html><body>{console.export_svg(title=f'{columns} columns')}"


def picture(browser: Browser, page: Path, out: Path, width: int, scheme: Any = "light") -> None:
    """Write the whole of a page, as it looks in a window of this width."""
    shown = browser.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme)
    shown.goto(page.resolve().as_uri())
    shown.screenshot(path=out, full_page=True)
    shown.close()


def main() -> None:
    """Take the pictures."""
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="where the pictures go")
    parser.add_argument("--site", type=Path, default=Path("site"),
                        help="folder of the docs as HTML (default: site)")
    args = parser.parse_args()
    out: Path = args.folder
    program = next(filter(None, map(shutil.which, ("chromium", "chromium-browser",
                                                   "google-chrome"))), None)
    if program is None:
        raise SystemExit("there is no Chromium on the path")
    front = args.site / "docs/index.html"
    if not front.is_file():
        raise SystemExit(f"there is no {front}: build the docs before (make docs)")
    out.mkdir(parents=True, exist_ok=True)
    with sync_playwright() as started:
        browser = started.chromium.launch(executable_path=program, args=["--no-sandbox"])
        for columns in (80, 120):
            work = out / f"run-{columns}"
            shutil.rmtree(work, ignore_errors=True)
            work.mkdir()
            drawn = out / f"live-{columns}.html"
            drawn.write_text(terminal_page(watch_run(columns, work), columns))
            picture(browser, drawn, drawn.with_suffix(".png"), 12 * columns)
        subprocess.run([*COMMAND, "report", "first"], cwd=work, check=True)
        for name, width in WIDTHS.items():
            for scheme in ("light", "dark"):
                picture(browser, work / "runs/first/report.html",
                        out / f"report-{name}-{scheme}.png", width, scheme)
        for name, width in WIDTHS.items():
            picture(browser, front, out / f"docs-{name}.png", width)
        browser.close()


if __name__ == "__main__":
    main()
