"""A picture of a real run in a terminal, as SVG: runs a command and draws what it printed.

    python docs/record_run.py docs/quickstart-run.svg
    python docs/record_run.py runaway.svg -- train +recipe=quickstart ppo.init_kl_coef=0

The command runs offline in an empty folder whose path is left out of the picture. Of the lines
between the first steps and the last ones only evaluations are drawn, and three dots for the rest;
nothing else is changed. The picture names no font to be loaded and asks for nothing outside itself.
"""

import argparse
import io
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from rich.console import Console
from rich.terminal_theme import TerminalTheme
from rich.text import Text

QUICKSTART = ["train", "+recipe=quickstart", "run_name=first"]
WIDTH = 110
HEAD, TAIL = 2, 1
"""steps drawn at the beginning and at the end"""

THEME = TerminalTheme(
    (24, 26, 31), (214, 216, 220),
    [(24, 26, 31), (220, 90, 90), (120, 190, 120), (215, 175, 95), (110, 160, 230),
     (190, 130, 215), (100, 190, 190), (214, 216, 220)])

# Rich's own format names a web font
FORMAT = """\
<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}">
<style>
.{unique_id}-matrix {{
  font-family: ui-monospace, Menlo, Consolas, "DejaVu Sans Mono", monospace;
  font-size: {char_height}px; line-height: {line_height}px;
}}
{styles}
</style>
<defs>
<clipPath id="{unique_id}-clip-terminal">
<rect x="0" y="0" width="{terminal_width}" height="{terminal_height}"/>
</clipPath>
{lines}
</defs>
<rect width="{width}" height="{height}" rx="8" fill="#181a1f"/>
<g transform="translate({terminal_x}, {terminal_y})"
   clip-path="url(#{unique_id}-clip-terminal)">
{backgrounds}
<g class="{unique_id}-matrix">
{matrix}
</g>
</g>
</svg>
"""


def run(words: list[str]) -> list[str]:
    """The lines that ``ppocli`` prints for ``words``, in an empty folder.

    Raises:
        SystemExit: the command failed.
    """
    with tempfile.TemporaryDirectory() as folder:
        here = os.path.realpath(folder)
        done = subprocess.run([sys.executable, "-m", "ppocli", *words], cwd=here, text=True,
                              stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False,
                              env={**os.environ, "HF_HUB_OFFLINE": "1"})
    if done.returncode != 0:
        raise SystemExit(f"the command ended with exit code {done.returncode}:\n{done.stdout}")
    return done.stdout.replace(f"{here}/", "").splitlines()


def shortened(lines: list[str]) -> list[str]:
    """The lines, without the steps in the middle."""
    steps = [i for i, line in enumerate(lines) if re.match(r"step \d+/\d+ ", line)]
    hidden = set(steps[HEAD:len(steps) - TAIL])
    shown: list[str] = []
    for i, line in enumerate(lines):
        if i not in hidden:
            shown.append(line)
        elif shown[-1] != "...":
            shown.append("...")
    return shown


def styled(line: str) -> Text:
    """A line as a terminal would show it; evaluations and warnings stand out a little."""
    text = Text(line)
    if line.startswith("eval at "):
        text.stylize("bold")
    elif line.startswith("warning: "):
        text.stylize("yellow")
    elif line == "...":
        text.stylize("dim")
    return text


def picture(words: list[str], lines: list[str]) -> str:
    """The SVG of a terminal in which ``ppocli`` with ``words`` printed ``lines``."""
    console = Console(record=True, width=WIDTH, file=io.StringIO(), force_terminal=True,
                      color_system="truecolor", highlight=False)
    console.print(Text.assemble(("$ ", "green"), ("ppocli " + " ".join(words), "bold")))
    for line in lines:
        console.print(styled(line))
    return console.export_svg(theme=THEME, code_format=FORMAT)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="the SVG file to write")
    parser.add_argument("words", nargs="*", default=QUICKSTART,
                        help="words for ppocli behind -- (default: the quickstart)")
    args = parser.parse_args()
    svg = picture(args.words, shortened(run(args.words)))
    args.out.write_text(svg, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
