"""A report's page as a browser shows it: nothing loaded, nothing foreign run, nothing cut off.

Needs playwright and a Chromium that is installed already: ``make test-browser``. Pictures of the
pages are left in pytest's temporary folder, for whoever wants to look.
"""

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from helpers import jsonl, ppocli, write_jsonl
from hostile import TEXTS, hostile_run
from runs import whole_copy

pytestmark = pytest.mark.browser
BROWSERS = ("chromium", "chromium-browser", "google-chrome")

OVERFLOW = "() => document.documentElement.scrollWidth - document.documentElement.clientWidth"
CHARTS = """() => [...document.querySelectorAll('figure.chart')].map(chart => {
  const box = chart.getBoundingClientRect(), canvas = chart.querySelector('canvas');
  const drawn = canvas.getBoundingClientRect();
  const pixels = canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height).data;
  const colours = new Set();
  for (let i = 0; i < pixels.length; i += 4)
    if (pixels[i + 3] > 250) colours.add(`rgb(${pixels.slice(i, i + 3).join(', ')})`);
  return {title: chart.querySelector('h3').firstChild.data, left: box.left, right: box.right,
          width: drawn.width, height: drawn.height, inside: drawn.right <= box.right + 1,
          colours: colours.size};
})"""
# WCAG 2 contrast of each text with the nearest background below it
CONTRASTS = """() => {
  const parse = text => text.match(/[\\d.]+/g).map(Number);
  const light = ([r, g, b]) => [r, g, b].map(v => v / 255).map(v =>
    v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4)
    .reduce((sum, v, i) => sum + v * [0.2126, 0.7152, 0.0722][i], 0);
  const ground = element => {
    for (let e = element; e; e = e.parentElement) {
      const colour = parse(getComputedStyle(e).backgroundColor);
      if (colour.length < 4 || colour[3] > 0) return colour;
    }
    return [255, 255, 255];
  };
  const found = {};
  for (const element of document.querySelectorAll('body *')) {
    const own = [...element.childNodes].some(n => n.nodeType === 3 && n.textContent.trim());
    if (!own || element.closest('script, .skip')) continue;
    const ink = light(parse(getComputedStyle(element).color));
    const paper = light(ground(element));
    const ratio = (Math.max(ink, paper) + 0.05) / (Math.min(ink, paper) + 0.05);
    const name = element.tagName + '.' + (element.getAttribute('class') || '');
    found[name] = Math.min(found[name] ?? 99, ratio);
  }
  return found;
}"""
LEGEND = """() => [...document.querySelectorAll('figure.chart')[0].querySelectorAll(
  '.u-series:not(.ghost)')].map(row => row.textContent)"""


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
    """The reports of a plain run, of a hostile one, of one that has only begun, and of a long run
    (forty steps, in which the reward is the step) with another over it."""
    folder = tmp_path_factory.mktemp("pages")
    hostile = hostile_run(reference, folder / "hostile")
    rows = jsonl(hostile / "metrics.jsonl")
    for number, text in enumerate(TEXTS[:3]):
        rows[-1][f"reward/{text}"] = rows[-1][f"eval/metrics/{text}"] = float(number)
    for row, sign in zip(rows[-3:], (-1, 0, 1), strict=True):
        row |= {"policy/grad_norm": sign * 1.7e308, "lr": 1e-320 * (sign + 1), "val/error": 1e25,
                "objective/entropy": 1e20 + 16384 * sign}
    write_jsonl(hostile / "metrics.jsonl", rows)
    begun = folder / "begun"
    begun.mkdir()
    for name in ("config.yaml", "run.json"):
        shutil.copy(reference / name, begun / name)
    long, last = whole_copy(reference, folder / "long"), jsonl(reference / "metrics.jsonl")[-1]
    write_jsonl(long / "metrics.jsonl", ({
        **last, "step": step, "reward/mean": float(step),
        "eval/reward_mean": step + 0.5 if step % 10 == 0 else None} for step in range(41)))
    found = {}
    for name, run in (("plain", reference), ("hostile", hostile), ("begun", begun), ("long", long)):
        found[name] = folder / f"{name}.html"
        more = ("--with", str(reference)) if name == "long" else ()
        ppocli("report", str(run), "-o", str(found[name]), *more, cwd=folder, code=0)
    return found


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [400, 500, 1000, 1600])
@pytest.mark.parametrize("name", ["plain", "hostile", "begun", "long"])
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
    page.wait_for_timeout(100)
    page.screenshot(path=tmp_path / f"{name}-{width}-{scheme}.png", full_page=True)
    assert asked == [address]
    assert said == []
    assert page.evaluate("() => [document.scripts.length, document.images.length]") == [2, 0]
    assert page.title() == f"{name if name != 'plain' else 'reference'}: PPO training report"
    assert page.evaluate(OVERFLOW) <= 0
    assert page.evaluate("() => [...document.querySelectorAll('nav a')].every("
                         "a => document.querySelector(a.getAttribute('href')))")
    charts = page.evaluate(CHARTS)
    assert len(charts) > 10 if name != "begun" else charts == []
    for chart in charts:
        assert chart["width"] > 250, chart
        assert chart["height"] > 100, chart
        assert 0 <= chart["left"] < chart["right"] <= width, chart
        assert chart["inside"], chart
        assert chart["colours"] > 2, chart
    assert page.locator("#undrawn").count() == 0
    if charts:  # a wide screen has more of them beside one another
        beside = len({chart["left"] for chart in charts[3:]})
        assert beside == {400: 1, 500: 1, 1000: 2, 1600: 3}[width]
    faint = {what: ratio for what, ratio in page.evaluate(CONTRASTS).items() if ratio < 4.5}
    assert faint == {}
    page.close()


def hover(page, step: float) -> list[str]:
    """What the first chart's legend says with the pointer at a step of forty."""
    box = page.locator(".u-over").first.bounding_box()
    page.mouse.move(box["x"] + box["width"] * step / 40, box["y"] + box["height"] / 2)
    page.wait_for_timeout(50)
    return page.evaluate(LEGEND)


def test_hovering_shows_values_of_every_run_and_smoothing_changes_them(chromium, pages):
    page = chromium.new_page(viewport={"width": 1200, "height": 900})
    page.goto(pages["long"].as_uri())
    first, rollouts, evaluation, others, _ = hover(page, 17)
    assert (first, rollouts) == ("step17", "rollouts, long17")
    assert evaluation == "evaluation, long10.500 (step 10)", "the newest one before"
    assert others.startswith("rollouts, reference")
    assert "step17" in page.locator("figure.chart").nth(1).inner_text().replace("\n", ""), \
        "one step in every chart"
    slider = page.locator("#smoothing input")
    slider.evaluate("(e) => { e.value = 4; e.dispatchEvent(new Event('input')) }")
    assert page.locator("#smoothing output").inner_text() == "mean of 10 steps"
    _, rollouts, evaluation, *_ = hover(page, 17.01)
    assert rollouts == "rollouts, long12.500", "the mean of 8 to 17"
    assert evaluation == "evaluation, long10.500 (step 10)", "which is never smoothed"
    page.close()


def test_the_slider_shows_the_samples_of_a_step(chromium, pages, reference):
    page = chromium.new_page()
    page.goto(pages["plain"].as_uri())
    rows = [row for row in jsonl(reference / "samples.jsonl") if row["kind"] == "eval"]
    steps = sorted({row["step"] for row in rows})[1:]
    slider = page.locator("#over input")
    assert int(slider.get_attribute("max")) == len(steps) - 1 > 0
    for number in (*range(len(steps)), 0):
        slider.evaluate("(e, n) => { e.value = n; e.dispatchEvent(new Event('input')) }", number)
        assert page.locator("#over output").inner_text() == str(steps[number])
        shown = page.evaluate("() => [...document.querySelectorAll('.pair section[data-step]')]"
                              ".filter(e => e.checkVisibility()).map(e => e.querySelector('.said')"
                              ".textContent)")
        first = {row["prompt"]: row["response"] for row in reversed(rows)
                 if row["step"] == steps[number]}
        assert shown == list(reversed(first.values()))[:len(shown)] != []
    page.close()


def test_without_scripts_the_page_says_so_and_has_the_tables(chromium, pages):
    page = chromium.new_page(java_script_enabled=False)
    page.goto(pages["plain"].as_uri())
    assert page.get_by_text("The table holds their figures.").is_visible()
    assert not page.locator("#smoothing").is_visible()
    assert not page.locator("#over").is_visible()
    page.get_by_text("The curves as figures").click()
    assert page.get_by_text("Reward: rollouts").is_visible()
    assert page.get_by_text("before", exact=True).first.is_visible()
    page.close()


def test_what_strangers_wrote_is_shown_as_it_was_and_never_run(chromium, pages):
    page = chromium.new_page()
    page.goto(pages["hostile"].as_uri())
    said = page.evaluate("() => [...document.querySelectorAll('.said')].map(e => e.textContent)")
    assert any(text.startswith("</script><script>document.title='owned'") for text in said)
    assert any("\\x1b[31mred\\x1b[0m" in text for text in said)
    assert any("abc \\u202egnp.exe" in text for text in said)
    labels = page.evaluate("() => [...document.querySelectorAll('.u-label')].map(e => "
                           "e.textContent)")
    assert TEXTS[0] in labels, "a metric's name in a legend"
    assert f"Metric {TEXTS[0]}" in page.evaluate(
        "() => [...document.querySelectorAll('figure h3')].map(e => e.firstChild.data)")
    # a script that got into the page all the same would not run
    assert page.evaluate("""() => new Promise(done => {
      const script = document.createElement('script');
      script.textContent = "window.owned = true";
      document.body.append(script);
      setTimeout(() => done(window.owned), 50)})""") is None
    page.close()
