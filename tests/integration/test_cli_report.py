"""``ppocli report``: what a page says of real runs, and what it never does."""

import base64
import hashlib
import json
import re
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
from helpers import jsonl, ppocli, read_json
from hostile import hostile_run
from reported import Page
from runs import PLANTED, Command, whole_copy

from ppocli.cli.app import app
from ppocli.cli.output import code_of


@pytest.fixture
def run(reference: Path, here: Path) -> Path:
    """A finished run of one's own."""
    return whole_copy(reference, here / "runs" / "one")


@pytest.fixture
def report(app: Command) -> Command:
    return partial(app, "report")


@pytest.fixture
def data_of(report: Command) -> Callable[[Path], dict]:
    """What ``--json`` prints."""
    return lambda run: json.loads(report(run, "--json", code=0).out)


@pytest.fixture
def text_of(report: Command) -> Callable[[Path], str]:
    """What its page says, which is written."""
    def text_of(run: Path) -> str:
        report(run, code=0)
        return Page(run / "report.html").text

    return text_of


@pytest.fixture(scope="module")
def written(reference: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run with the report that the command writes into the newest run."""
    folder = tmp_path_factory.mktemp("written")
    run = whole_copy(reference, folder / "runs/one")
    done = ppocli("report", cwd=folder, HF_TOKEN=PLANTED, code=0)
    assert done.stdout == "runs/one/report.html\n"
    assert done.stderr == "using runs/one (the newest run)\n"
    return run


@pytest.fixture(scope="module")
def html(written: Path) -> str:
    """Its page as it lies there."""
    return (written / "report.html").read_text(encoding="utf-8")


def drawn_data(page: Path) -> dict:
    """What the page's script draws."""
    [data] = re.findall(r'<script type="application/json" id="data">(.*?)</script>',
                        page.read_text(encoding="utf-8"))
    return json.loads(data)


def test_a_page_tells_of_the_run(written):
    rows = jsonl(written / "metrics.jsonl")
    before, after = rows[0]["eval/reward_mean"], rows[-1]["eval/reward_mean"]
    page = Page(written / "report.html")
    assert f"{before:.3f} → {after:.3f}" in page.text
    for part in ("ppo.kl_controller", "adaptive", "rewards.py:score", "ppo.horizon", "10000",
                 "ppocli train", "before (step 0)", "after (step 4)", "transformers",
                 "All 4 steps are done.", "newest"):
        assert part in page.text, part
    assert PLANTED not in page.text
    drawn = drawn_data(written / "report.html")
    assert [curve["title"] for curve in drawn["curves"]][:2] == ["Reward", "KL to the reference"]
    assert len(drawn["curves"]) > 10
    rollouts, evaluation = drawn["curves"][0]["lines"]
    assert evaluation["points"][0] == [row["step"] for row in rows if "eval/reward_mean" in row]
    assert rollouts["points"][1] == pytest.approx([row["reward/mean"] for row in rows[1:]],
                                                  rel=1e-5)
    assert {"img", "iframe", "object", "base"} & set(page.tags) == set()


def test_only_the_script_that_the_page_names_may_run(html):
    [policy] = re.findall(r'http-equiv="Content-Security-Policy" content="([^"]+)"', html)
    [script] = re.findall(r"<script>(.*?)</script>", html, re.DOTALL)
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert policy == (f"default-src 'none'; script-src 'sha256-{digest}'; style-src "
                      "'unsafe-inline'; img-src data:; base-uri 'none'; form-action 'none'")
    assert not re.search(r"<!--|<script|innerHTML\s*=\s*[^\"']*(?:name|title|label)", script)
    assert "Copyright (c) 2022 Leon Sorokin" in script
    assert re.search(r"uPlot \(v1\.\d+\.\d+\)", script)


def test_a_page_refers_to_nothing_outside_itself(written, html):
    assert not re.search(r"url\(|@import|fetch\(|XMLHttpRequest|WebSocket|import\(", html)
    assert set(re.findall(r"https?://[^\"'<\s]+", html)) == {
        "https://github.com/leeoniya/uPlot"}, "where the library says it is from"
    page = Page(written / "report.html")
    loading = {value for name, value in page.attributes
               if name in ("src", "href", "srcset", "action", "data", "poster")}
    assert {value for value in loading if value[0] != "#"} == {"data:,"}
    ids = [value for name, value in page.attributes if name == "id"]
    links = {value[1:] for name, value in page.attributes if name == "href" and value[0] == "#"}
    assert len(ids) == len(set(ids))
    assert links <= set(ids)
    assert len(links) == len({"asked", "outcome", "curves", "samples", "warnings", "checkpoints",
                              "environment", "reproduce"})


def test_samples_of_one_prompt_stand_together_but_only_two_are_seen_at_first(written, html,
                                                                             data_of):
    data = data_of(written)
    shown = data["samples"]
    rows = {(row["step"], row["prompt"]): row for row in reversed(jsonl(written / "samples.jsonl"))
            if row["kind"] == "eval"}
    steps = sorted({step for step, _ in rows})
    assert shown["between"] == steps[1:-1] != []
    for pair in shown["pairs"]:
        told = [(0, pair["before"]), (4, pair["after"]),
                *zip(shown["between"], pair["between"], strict=True)]
        for step, response in told:
            row = rows[step, pair["prompt"]]
            assert (response["text"], response["score"]) == (row["response"], row["score"])
        for step, response in told[:2]:
            assert response["kl"] == rows[step, pair["prompt"]]["kl"]
    for step in steps[1:]:
        hidden = " hidden" if step != steps[-1] else ""
        assert html.count(f'<section data-step="{step}"{hidden}>') == len(shown["pairs"])
    scores = [row["score"] for row in jsonl(written / "samples.jsonl")
              if row["kind"] == "eval" and row["step"] == 4]
    assert shown["scores_after"] == scores
    assert {row["name"]: row["after"] for row in data["outcome"]}["reward_mean"] == pytest.approx(
        sum(scores) / len(scores))


@pytest.fixture(scope="module")
def hostile(reference: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A hostile run with its report."""
    run = hostile_run(reference, tmp_path_factory.mktemp("reports") / "hostile")
    assert code_of(lambda: app(["report", str(run)], prog_name="ppocli")) == 0
    return run


def test_hostile_texts_stay_texts_on_the_page(hostile):
    raw = (hostile / "report.html").read_text(encoding="utf-8")
    assert not re.search("[\x00-\x09\x0b-\x1f\x7f-\x9f\u202e\u2066\u2069\ud800-\udfff]", raw)
    page = Page(hostile / "report.html")
    assert "img" not in page.tags
    assert page.tags.count("script") == 2, "the data, and what draws it"
    assert "<script>document" not in raw
    assert "alert(1)" not in "".join(value for _, value in page.attributes)
    for part in ("</script><script>document.title='owned'", "a | b || c \\| d", "{{ 7 * 7 }}",
                 "\\x1b[31mred", "\\u202egnp.exe", "lone \\ud83d surrogate", "&amp;",
                 "(18,500 more characters)", "<b>bold|name", "0.500 ± 0.125", "0.750 ± 0.100"):
        assert part in page.text, part
    assert PLANTED not in raw


@pytest.mark.parametrize(("status", "said"), [
    ("failed", "Failed at step 4 of 4."),
    ("interrupted", "Ended at step 4 of 4 without saying why")])
def test_an_unfinished_run_gets_a_report_that_says_so(run, text_of, status, said):
    summary = read_json(run / "summary.json")
    summary |= {"status": status, "error": "the <disk> was full", "eval_after": None}
    (run / "summary.json").write_text(json.dumps(summary))
    if status == "interrupted":
        (run / "summary.json").unlink()
    shutil.rmtree(run / "model")
    shutil.rmtree(run / "checkpoints")
    found = text_of(run)
    assert said in found
    assert f"ppocli resume {run}" in found
    assert "None are kept." in found
    assert ("the <disk> was full" in found) == (status == "failed")


def test_changes_of_a_resume_are_named_and_the_promise_is_dropped(written, run, text_of):
    promise, warned = "on a CPU in fp32, byte for byte", "it need not give the same numbers"
    assert promise in Page(written / "report.html").text
    told = read_json(run / "run.json")
    told["changes"] = [{"step": 2, "key": "reward.kwargs.<i>", "before": "a|b", "after": "0.25"}]
    (run / "run.json").write_text(json.dumps(told))
    page = text_of(run)
    assert promise not in page
    assert warned in page
    assert "reward.kwargs.<i> a|b 0.25 2" in page


def test_only_files_that_are_reports_are_replaced(run, report):
    mine = run / "report.html"
    mine.write_text("my own notes\n")
    ended = report(run, code=2)
    assert ended.out == ""
    assert f"{mine} exists and was not written by ppocli report." in ended.err
    assert mine.read_text() == "my own notes\n"
    report(run, "--overwrite", code=0)
    report(run, code=0)  # its own file it replaces


def test_a_file_or_a_folder_can_be_named(run, report, here):
    assert report(run, "-o", "new/place/talk.html", code=0).out == "new/place/talk.html\n"
    assert not (run / "report.html").exists()
    assert report(run, "-o", here).out == f"{here}/report.html\n"
