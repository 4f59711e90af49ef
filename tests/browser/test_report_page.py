"""A report's page as a browser shows it: nothing loaded, nothing run, nothing cut off.

Needs playwright and a Chromium that is installed already: ``make test-browser``. Pictures of the
pages are left in pytest's temporary folder, for whoever wants to look.
"""

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from helpers import ppocli
from hostile import hostile_run

pytestmark = pytest.mark.browser
BROWSERS = ("chromium", "chromium-browser", "google-chrome")

OVERFLOW = "() => document.documentElement.scrollWidth - document.documentElement.clientWidth"
PICTURES = """() => [...document.querySelectorAll('svg')].map(svg => {
  const box = svg.getBoundingClientRect();
  const letters = [...svg.querySelectorAll('text')].map(t => t.getBoundingClientRect());
  return {name: svg.getAttribute('aria-label'), width: box.width, height: box.height,
          left: box.left, right: box.right,
          letters: Math.min(...[...svg.querySelectorAll('text')].map(t => box.width
            / svg.viewBox.baseVal.width * parseFloat(getComputedStyle(t).fontSize))),
          outside: letters.filter(b => b.left < box.left - 1 || b.right > box.right + 1
                                    || b.top < box.top - 1 || b.bottom > box.bottom + 1).length};
})"""
# WCAG 2 contrast of each text with the nearest background below it; of SVG text with its page
CONTRASTS = """() => {
  const parse = text => text.match(/[\\d.]+/g).map(Number);
  const light = ([r, g, b]) => [r, g, b].map(v => v / 255).map(v =>
    v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4)
    .reduce((sum, v, i) => sum + v * [0.2126, 0.7152, 0.0722][i], 0);
  const ground = element => {
    const svg = element.closest('svg');
    if (svg) return parse(getComputedStyle(svg.querySelector('.pc-page')).fill);
    for (let e = element; e; e = e.parentElement) {
      const colour = parse(getComputedStyle(e).backgroundColor);
      if (colour.length < 4 || colour[3] > 0) return colour;
    }
    return [255, 255, 255];
  };
  const found = {};
  for (const element of document.querySelectorAll('body *')) {
    const own = [...element.childNodes].some(n => n.nodeType === 3 && n.textContent.trim());
    if (!own || element.closest('title, style, .skip')) continue;
    const style = getComputedStyle(element);
    const ink = light(parse(element.closest('svg') ? style.fill : style.color));
    const paper = light(ground(element));
    const ratio = (Math.max(ink, paper) + 0.05) / (Math.min(ink, paper) + 0.05);
    const name = element.tagName + '.' + (element.getAttribute('class') || '');
    found[name] = Math.min(found[name] ?? 99, ratio);
  }
  return found;
}"""


@pytest.fixture(scope="module")
def chromium() -> Iterator[object]:
    """A headless Chromium without a network of its own."""
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    program = next(filter(None, map(shutil.which, BROWSERS)), None)
    if program is None:
        pytest.skip(f"no browser: none of {', '.join(BROWSERS)} is on the path")
    with playwright.sync_playwright() as started:
        browser = started.chromium.launch(executable_path=program, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def pages(reference: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The reports of a plain run, of a hostile one, and of one that has only begun."""
    folder = tmp_path_factory.mktemp("pages")
    hostile_run(reference, folder / "hostile")
    begun = folder / "begun"
    begun.mkdir()
    for name in ("config.yaml", "run.json"):
        shutil.copy(reference / name, begun / name)
    found = {}
    for name, run in (("plain", reference), ("hostile", folder / "hostile"), ("begun", begun)):
        found[name] = folder / f"{name}.html"
        ppocli("report", str(run), "-o", str(found[name]), cwd=folder, code=0)
    return found


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [400, 1200])
@pytest.mark.parametrize("name", ["plain", "hostile", "begun"])
def test_a_page_is_whole_quiet_and_readable(chromium, pages, name, width, scheme, tmp_path):
    page = chromium.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme)
    asked, said = [], []
    page.on("request", lambda request: asked.append(request.url))
    page.on("console", lambda message: said.append(message.text))
    page.on("pageerror", lambda error: said.append(str(error)))
    page.on("dialog", lambda dialog: said.append(dialog.message))
    address = pages[name].as_uri()
    page.goto(address)
    page.evaluate("() => document.querySelectorAll('details').forEach(d => { d.open = true })")
    page.screenshot(path=tmp_path / f"{name}-{width}-{scheme}.png", full_page=True)
    assert asked == [address]
    assert said == []
    assert page.evaluate("() => document.scripts.length + document.images.length") == 0
    assert page.title() == f"{name if name != 'plain' else 'reference'}: PPO training report"
    assert page.evaluate(OVERFLOW) <= 0
    assert page.evaluate("() => [...document.querySelectorAll('nav a')].every("
                         "a => document.querySelector(a.getAttribute('href')))")
    pictures = page.evaluate(PICTURES)
    assert len(pictures) > 10 if name != "begun" else pictures == []
    for picture in pictures:
        assert picture["width"] > 250, picture
        assert picture["height"] > 100, picture
        assert 0 <= picture["left"] < picture["right"] <= width, picture
        assert picture["letters"] > 8, picture
        assert picture["outside"] == 0, picture
    faint = {what: ratio for what, ratio in page.evaluate(CONTRASTS).items() if ratio < 4.5}
    assert faint == {}
    page.close()


def test_the_colours_follow_the_scheme(chromium, pages):
    seen = {}
    for scheme in ("light", "dark"):
        page = chromium.new_page(color_scheme=scheme)
        page.goto(pages["plain"].as_uri())
        seen[scheme] = page.evaluate(
            "() => [getComputedStyle(document.body).backgroundColor,"
            " getComputedStyle(document.querySelector('svg .pc-page')).fill]")
        page.close()
    assert all(one != other for one, other in zip(seen["light"], seen["dark"], strict=True))


def test_what_a_model_wrote_is_shown_as_it_was(chromium, pages):
    page = chromium.new_page()
    page.goto(pages["hostile"].as_uri())
    said = page.evaluate("() => [...document.querySelectorAll('.said')].map(e => e.textContent)")
    assert any(text.startswith("</script><script>document.title='owned'") for text in said)
    assert any("\\x1b[31mred\\x1b[0m" in text for text in said)
    assert any("abc \\u202egnp.exe" in text for text in said)
    page.close()
