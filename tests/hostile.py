"""A finished run whose texts try to break out of every place where a report shows them."""

import json
from pathlib import Path

from helpers import jsonl
from runs import whole_copy

TEXTS = (
    "</script><script>document.title='owned'</script><img src=x onerror=alert(1)>",
    "a | b || c \\| d",
    "```\nout of the fence\n````\n~~~\n# heading",
    "\x1b[31mred\x1b[0m \x07\x9b2J\r\nnext line",
    "abc \u202egnp.exe \u2066isolated\u2069",
    "long" * 5000,
    "{{ 7 * 7 }} {% raw %} ${HOME} `id` <!-- --> ]]> &amp;",
    "lone \ud83d surrogate, null \x00, [link](javascript:alert(1)) https://example.org @all",
)


def hostile_run(source: Path, target: Path) -> Path:
    """A copy of a finished run with :data:`TEXTS` as prompts, responses and warnings."""
    whole_copy(source, target)
    first, last = sorted({row["step"] for row in jsonl(target / "samples.jsonl")
                          if row["kind"] == "eval"})[::2][:2]
    rows = [{"step": step, "kind": "eval", "prompt": text, "response": text[::-1] + text,
             "score": number / 3 - 1, "kl": 0.5 * number, "response_tokens": 3, "finished": True}
            for step in (first, last) for number, text in enumerate(TEXTS)]
    rows[0]["score"] = rows[1]["kl"] = None
    text = "".join(json.dumps(row) + "\n" for row in rows)
    (target / "samples.jsonl").write_text(text, encoding="utf-8")
    with (target / "ppocli.log").open("a", encoding="utf-8", errors="replace") as log:
        for text in TEXTS:
            log.write(f"2026-01-31 12:00:00,000 WARNING {text}\n")
    folder = target / "eval" / "<b>bold|name"
    folder.mkdir(parents=True)
    (folder / "eval.json").write_text(json.dumps({
        "name": "x", "model": {"name": TEXTS[0]}, "samples": 8,
        "figures": {"reward_mean": 0.5, "kl_mean": 1.25}, "stderr": {"reward_mean": 0.125},
        "quantiles": {}, "scored": 8, "frontier": None, "base": None, "time": {"finished": "now"},
        "against": {"model": {"name": TEXTS[1]}}, "win_rate": {"win_rate": 0.75, "stderr": 0.1}}))
    (target / "env.json").write_text(json.dumps({
        "platform": TEXTS[2], "cpu": {"model": TEXTS[4], "cores": 2}, "nothing": None,
        "variables": {"HF_TOKEN": "hf_PLANTEDabcdefghijklmnopqrstuvwxyz"}}))
    return target
