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


def test_other_runs_lie_over_the_curves(run, report):
    other = whole_copy(run, run.parent / "<b>other")
    report(run, "--with", other, "--with", run, code=0)
    assert "The curves also show <b>other (finished)." in Page(run / "report.html").text
    curves = {curve["title"]: curve for curve in drawn_data(run / "report.html")["curves"]}
    assert [(line["name"], line["run"]) for line in curves["Reward"]["lines"]] == [
        ("rollouts, one", 0), ("evaluation, one", 0), ("rollouts, <b>other", 1),
        ("evaluation, <b>other", 1)]
    assert {line["run"] for line in curves["Time of a step"]["lines"]} == {-1}


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


def test_equal_warnings_are_counted_once_and_dated(run, data_of):
    with (run / "ppocli.log").open("a") as log:
        for step in (5, 6, 7):
            log.write(f"2026-01-31 12:00:0{step},000 INFO step {step}/9  reward 0.1\n"
                      f"2026-01-31 12:00:0{step},500 WARNING Mean ratio 1{step}.5 exceeds.\nmore\n")
    assert data_of(run)["complaints"][-1] == {
        "level": "warning", "text": "Mean ratio 15.5 exceeds.\nmore",
        "time": "2026-01-31 12:00:05", "step": 5, "count": 3}


@pytest.mark.parametrize(("status", "said"), [
    ("stopped", "Stopped at step 4 of 4."), ("failed", "Failed at step 4 of 4."),
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


def test_a_run_that_has_only_begun_gets_a_report(run, text_of):
    for path in run.iterdir():
        if path.name not in ("config.yaml", "run.json"):
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    found = text_of(run)
    for part in ("No evaluation has ended yet", "No step has ended yet.",
                 "No evaluation samples were written.", "None are kept."):
        assert part in found, part


def set_key(run: Path, key: str, value: str) -> None:
    config = (run / "config.yaml").read_text()
    (run / "config.yaml").write_text(re.sub(f"(?m)^(  {key}:) .*$", rf"\1 {value}", config))


def test_a_run_of_python_objects_has_no_command(run, text_of):
    set_key(run, "fn", "<python object>")
    found = text_of(run)
    assert "started from Python with Python objects" in found
    assert "ppocli train" not in found


@pytest.mark.slow
def test_ten_thousand_steps_are_thinned(run, text_of, data_of):
    row = jsonl(run / "metrics.jsonl")[-1]
    with (run / "metrics.jsonl").open("w") as file:
        for step in range(1, 10_001):
            file.write(json.dumps({**row, "step": step, "reward/mean": step % 97,
                                   "val/var_explained": -5.0 - (step in (1, 9_999)),
                                   "lr": 0.5 if step in (1, 10_000) else step % 7}) + "\n")
    text = text_of(run)
    assert (run / "report.html").stat().st_size < 1_000_000
    drawn = {curve["title"]: curve for curve in drawn_data(run / "report.html")["curves"]}
    assert drawn["Explained variance of the returns"]["notes"] == "Values below -1 are drawn at -1."
    assert drawn["Explained variance of the returns"]["floor"] == -1
    lines = [line for curve in data_of(run)["curves"] for line in curve["lines"]]
    assert max(len(line["points"]) for line in lines) == 1000
    assert "Explained variance of the returns -6 -5 -6 -5 " in text
    assert "Learning rate 0.500 0.500 0 6 " in text


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
    assert ended.err == (f"Error: {mine} exists and was not written by ppocli report.\n"
                   f"  where: {mine}\n  fix:   choose another file with --output, or replace it "
                   "with --overwrite\n")
    assert mine.read_text() == "my own notes\n"
    report(run, "--overwrite", code=0)
    report(run, code=0)  # its own file it replaces


def test_a_file_or_a_folder_can_be_named(run, report, here):
    assert report(run, "-o", "new/place/talk.html", code=0).out == "new/place/talk.html\n"
    assert not (run / "report.html").exists()
    assert report(run, "-o", here).out == f"{here}/report.html\n"


@pytest.mark.parametrize(("options", "code", "what"), [
    (["-o", "x.pdf"], 2, "x.pdf is no name of a page."),
    (["--json", "-o", "x.html"], 2, "--json prints the report's data and writes no file."),
    (["-o", f"{'n' * 300}.html"], 6, "Path too long")])
def test_what_is_refused(run, report, options, code, what):
    ended = report(run, *options, code=code)
    assert ended.out == ""
    assert ended.err.startswith(f"Error: {what}"), ended.err
    assert "  fix:   " in ended.err
