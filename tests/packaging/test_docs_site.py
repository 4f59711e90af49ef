"""The documentation as a site: it builds without a warning, asks nothing of the network, and the
pictures in it are what their script makes."""

import importlib.util
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest
from helpers import environment

ROOT = Path(__file__).resolve().parents[2]
LOADED = {"script": ("src",), "link": ("href",), "img": ("src", "srcset"), "iframe": ("src",),
          "source": ("src", "srcset"), "video": ("src", "poster"), "audio": ("src",),
          "object": ("data",), "embed": ("src",), "image": ("href", "xlink:href"),
          "use": ("href", "xlink:href"), "font": ("src",), "base": ("href",)}
"""what a browser fetches by itself: tag -> attributes"""
ELSEWHERE = re.compile(r"(?:https?:)?//", re.IGNORECASE)
IN_STYLES = re.compile(r"(?:url\(\s*|@import\s+)['\"]?((?:https?:)?//[^)'\"\s]*)", re.IGNORECASE)


class Page(HTMLParser):
    """The resources of one page."""

    def __init__(self, file: Path) -> None:
        super().__init__()
        self.resources: list[str] = []
        self.feed(file.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            if value and name in LOADED.get(tag, ()):
                self.resources += [part.split()[0] for part in value.split(",")
                                   if part.strip()] if name == "srcset" else [value]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The built pages; as `make docs` builds them."""
    for module in ("sphinx", "myst_parser", "furo"):
        if importlib.util.find_spec(module) is None:
            pytest.skip(f"no {module}: make docs installs it")
    out = tmp_path_factory.mktemp("docs") / "site"
    done = subprocess.run(
        [sys.executable, "-m", "sphinx", "-W", "--keep-going", "-q", "-E", "-c", ROOT / "docs",
         "-d", out.parent / "doctrees", "-b", "html", ROOT, out], cwd=ROOT, text=True,
        capture_output=True, env=environment(), timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    return out


def test_pages_load_nothing_from_elsewhere(site):
    found = {f"{page.relative_to(site)}: {resource}" for page in site.rglob("*.html")
             for resource in Page(page).resources if ELSEWHERE.match(resource)}
    assert found == set()
    styled = [file for kind in ("*.css", "*.svg", "*.html") for file in site.rglob(kind)]
    assert len(styled) > 20
    assert {f"{file.relative_to(site)}: {url}" for file in styled
            for url in IN_STYLES.findall(file.read_text(encoding="utf-8"))} == set()


def test_the_front_door_leads_to_the_first_page(site):
    text = (site / "index.html").read_text(encoding="utf-8")
    target = re.search(r'content="0; url=([^"]+)"', text)
    assert target is not None
    assert (site / target[1]).is_file()


def test_every_page_leads_to_the_glossary_and_formulas_are_typeset_from_files_of_the_site(site):
    pages = {page: page.read_text(encoding="utf-8") for page in (site / "docs").rglob("*.html")}
    assert len(pages) > 40
    assert [page.name for page, text in pages.items()
            if "glossary.html" not in text and page.name != "glossary.html"] == []
    lesson = site / "docs/learn/the-loop.html"
    [script] = [resource for resource in Page(lesson).resources if "mathjax" in resource]
    assert (lesson.parent / script.split("?")[0]).is_file()
    assert 'class="math' in pages[lesson]


def test_pictures_are_small_and_ask_for_nothing():
    pictures = sorted((ROOT / "docs").rglob("*.svg"))
    drawn = {picture.name for picture in pictures}
    assert {"quickstart-run.svg", "quickstart-curve.svg", "loop.svg", "holes.svg"} <= drawn
    for picture in pictures:
        text = picture.read_text(encoding="utf-8")
        assert len(text.encode()) < 150_000, picture.name
        names = re.findall(r'xmlns(?::\w+)?="[^"]*"', text)
        for name in names:
            text = text.replace(name, "")
        assert not re.search(r"https?://|@font-face|@import|<image|<script|url\((?!#)", text)


@pytest.mark.slow
def test_a_recorded_run_shows_the_output_and_not_the_machine(tmp_path):
    out = tmp_path / "run.svg"
    words = ["train", "+recipe=quickstart", "run_name=first", "ppo.total_episodes=64",
             "ppo.num_rollouts=16", "ppo.mini_batch_size=16", "ppo.ppo_epochs=1",
             "prompts.eval.limit=2", "prompts.eval.repeat=1", "generation.max_new_tokens=4",
             "eval.every_steps=3"]
    done = subprocess.run([sys.executable, ROOT / "docs/record_run.py", out, "--", *words],
                          env=environment(), text=True, capture_output=True, timeout=240,
                          check=False)
    assert done.returncode == 0, done.stderr
    text = out.read_text(encoding="utf-8").replace("&#160;", " ")
    for shown in ("ppocli train +recipe=quickstart run_name=first", "step 1/4 ", "step 2/4 ",
                  "step 4/4 ", "eval at step 3 ", "reward_mean", ">runs/first/model<"):
        assert shown in text, shown
    assert "step 3/4 " not in text
    assert "/tmp" not in text
    assert str(tmp_path) not in text
