"""The figures of these lessons, from runs that it makes itself (five minutes on one core):

    python docs/learn/draw.py                # all of them
    python docs/learn/draw.py loop reading   # some

Each run is one that its lesson tells to type, in a folder that is thrown away.
"""

import argparse
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from ppocli.publish.curves import Line, Panel, draw
from ppocli.runs.record import read_run

HERE = Path(__file__).parent
SAVED = re.compile(r"Save as `([\w.]+)`:\n\n```\w+\n(.*?)^```$", re.MULTILINE | re.DOTALL)

LOOP = """\
<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 760 330" font-family="sans-serif" \
font-size="13" fill="#222">
<rect width="760" height="330" rx="8" fill="#fff"/>
<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="8" markerHeight="8" \
orient="auto"><path d="M0 0L8 4L0 8z" fill="#555"/></marker></defs>
<g fill="none" stroke="#555" stroke-width="1.4" marker-end="url(#tip)">
<path d="M130 70H168"/><path d="M308 70H346"/><path d="M486 56H558V36H584"/>
<path d="M486 70H584"/><path d="M486 84H558V104H584"/>
<path d="M660 124V218"/><path d="M584 250H486"/><path d="M346 250H238V102"/></g>
{boxes}
<g fill="#666" font-size="12">
<text x="22" y="190">In the quickstart, step {step}:</text>
<text x="22" y="208">{prompts} responses,</text>
<text x="22" y="226">reward {reward:.2f}, KL {kl:.2f}</text>
<text x="22" y="252">Step {last}:</text>
<text x="22" y="270">reward {last_reward:.2f}, KL {last_kl:.2f}</text></g>
<g font-style="italic" fill="#3a6ea5"><text x="338" y="30" text-anchor="middle">rollout</text>
<text x="416" y="310" text-anchor="middle">optimize: the same samples, several times</text></g>
</svg>
"""
BOX = """<g><rect x="{x}" y="{y}" width="{w}" height="{h}" rx="6" fill="{fill}" stroke="#888"/>
<text x="{middle}" y="{first}" text-anchor="middle" font-weight="bold">{name}</text>
<text x="{middle}" y="{second}" text-anchor="middle" font-size="11">{about}</text></g>"""
BOXES = [(20, 40, 110, 62, "#f3f3f3", "prompts", "what is asked"),
         (168, 40, 140, 62, "#dceaf7", "policy", "the model that learns"),
         (346, 40, 140, 62, "#f3f3f3", "responses", "sampled by the policy"),
         (584, 10, 160, 44, "#e3f2e1", "reward", "how good it is"),
         (584, 58, 160, 44, "#f7ecd9", "reference", "how far it has gone: KL"),
         (584, 106, 160, 44, "#f0e1f2", "critic", "how good it would be"),
         (584, 218, 160, 64, "#f3f3f3", "advantages", "better than expected?"),
         (346, 218, 140, 64, "#dceaf7", "update", "likelier, or less so")]


def train(folder: Path, *words: str) -> Path:
    """A run in ``folder``, once; returns where it is."""
    name = next(word for word in words if word.startswith("run_name=")).removeprefix("run_name=")
    run = folder / "runs" / name
    if not run.exists():
        env = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
        subprocess.run([sys.executable, "-m", "ppocli", *words], cwd=folder, env=env, check=True,
                       stdout=subprocess.DEVNULL)
    return run


def curve(run: Path, figure: str, x: str = "episode") -> list[tuple[float, float]]:
    """(x, figure) of each row that has it."""
    return [(row[x], row[figure]) for row in read_run(run).rows if row.get(figure) is not None]


def quickstart(folder: Path) -> Path:
    return train(folder, "train", "+recipe=quickstart", "run_name=first")


def loop(folder: Path) -> bytes:
    """Who does what in a step, with the figures of a real one."""
    rows = read_run(quickstart(folder)).rows
    first, last = (next(row for row in rows if row["step"] == step)
                   for step in (1, rows[-1]["step"]))
    boxes = "\n".join(BOX.format(x=x, y=y, w=w, h=h, fill=fill, name=name, about=about,
                                 middle=x + w / 2, first=y + h / 2 - 3, second=y + h / 2 + 14)
                      for x, y, w, h, fill, name, about in BOXES)
    return LOOP.format(boxes=boxes, step=1, prompts=first["episode"], last=last["step"],
                       reward=first["reward/mean"], kl=first["objective/kl"],
                       last_reward=last["reward/mean"], last_kl=last["objective/kl"]).encode()


def reading(folder: Path) -> bytes:
    """What to look at in a run."""
    run = quickstart(folder)
    shown = {"reward": ("reward/mean", "eval/reward_mean"),
             "KL to the reference, nats a response": ("objective/kl", "eval/kl_mean"),
             "tokens of a response": ("rollout/response_tokens_mean", "eval/response_tokens_mean")}
    return draw([Panel(name, [Line("rollouts", curve(run, rollout), "thin"),
                              Line("evaluation, fixed prompts", curve(run, held_back), "dots")],
                       "episodes") for name, (rollout, held_back) in shown.items()])


def holes(folder: Path) -> bytes:
    """The same task under three rewards, and what none of them measures."""
    page = (HERE / "rewards-and-their-holes.md").read_text(encoding="utf-8")
    for name, content in SAVED.findall(page):
        (folder / name).write_text(content, encoding="utf-8")
    typed = re.findall(r"^\$ ppocli (train .*?[^\\])$", page, re.MULTILINE | re.DOTALL)
    runs = [train(folder, *command.replace("\\\n", " ").split()) for command in typed]
    shown = {"reward, in parts of its highest": "eval/reward_mean",
             "share of words that a response has said before": "eval/metrics/repeated"}
    panels = []
    for title, figure in shown.items():
        lines = []
        for number, run in enumerate(runs):
            points = curve(run, figure)
            most = max(y for _, y in points) if figure == "eval/reward_mean" else 1.0
            lines.append(Line(run.name, [(x, y / most) for x, y in points], run=number))
        panels.append(Panel(title, lines, "episodes"))
    return draw(panels)


def road(folder: Path) -> bytes:
    """PPO against a learned reward: what it optimises, and what it is meant for."""
    train(folder, "sft", "+recipe=pipeline_sft", "run_name=pipeline-sft")
    train(folder, "reward-model", "+recipe=pipeline_reward", "run_name=pipeline-reward")
    runs = {"with the KL term": ("run_name=pipeline-ppo",),
            "without": ("run_name=off", "ppo.init_kl_coef=0", "ppo.optimizer.lr=2e-3")}
    trained = {name: train(folder, "train", "+recipe=pipeline_ppo", *words)
               for name, words in runs.items()}
    return draw([Panel(title, [Line(name, curve(run, figure), run=number)
                               for number, (name, run) in enumerate(trained.items())], "episodes")
                 for title, figure in (("learned reward: what PPO is told", "eval/reward/learned"),
                                       ("true reward: what is wanted", "eval/reward/gold"))])


FIGURES: dict[str, Callable[[Path], bytes]] = {"loop": loop, "reading": reading, "holes": holes,
                                               "road": road}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(FIGURES)}")
    parser.add_argument("--folder", type=Path, help="keep the runs here, and take those in it")
    args = parser.parse_args()
    if wrong := set(args.names) - set(FIGURES):
        parser.error(f"no figure {', '.join(sorted(wrong))}: {', '.join(FIGURES)}")
    with tempfile.TemporaryDirectory() as kept:
        folder = args.folder or Path(kept)
        folder.mkdir(parents=True, exist_ok=True)
        for name in args.names or FIGURES:
            (HERE / f"{name}.svg").write_bytes(FIGURES[name](folder))
            print(f"docs/learn/{name}.svg")


if __name__ == "__main__":
    main()
