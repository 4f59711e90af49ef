"""Pictures by matplotlib: what is in them, whatever the values and names; thinned curves."""

import math
import re
from xml.etree import ElementTree

from ppocli.publish.curves import thin
from ppocli.publish.pictures import Line, Panel, draw

SVG = "{http://www.w3.org/2000/svg}"


def texts(svg: bytes) -> list[str]:
    return [(element.text or "").strip()
            for element in ElementTree.fromstring(svg).iter(f"{SVG}text")]


def strokes(svg: bytes) -> set[tuple[str, str]]:
    """(colour, width) of what is drawn as lines."""
    return set(re.findall(r"stroke: (#[0-9a-f]{6});[^\"]*?stroke-width: ([\d.]+)", svg.decode()))


def test_lines_have_a_legend_and_equal_pictures_equal_bytes():
    panel = Panel("Reward", [Line("rollouts", [(0, 1.0), (1, 2.0)], "thin"),
                             Line("_evaluation", [(0, 1.0), (1, 3.0)], "dots")], "step", "score")
    svg = draw([panel, Panel("Loss", [Line("alone", [(0, 1.0)])])])
    assert {"Reward", "Loss", "rollouts", "_evaluation", "score"} <= set(texts(svg))
    assert "alone" not in texts(svg)
    assert texts(svg).count("step") == 2
    assert svg == draw([panel, Panel("Loss", [Line("alone", [(0, 1.0)])])])
    assert draw([panel], "png").startswith(b"\x89PNG\r\n\x1a\n")
    for name in re.findall(rb'xmlns(?::\w+)?="[^"]*"', svg):
        svg = svg.replace(name, b"")
    assert svg.startswith(b"<svg")
    assert b"://" not in svg


def test_lines_of_one_run_share_a_colour():
    points = [(0, 1.0), (1, 2.0)]
    one, other = (draw([Panel("t", [Line("a", points, "thin", run), Line("b", points, "dots", run)])
                        ]) for run in (0, 1))
    assert {"#1f77b4"} == {colour for colour, _ in strokes(one)} & {"#1f77b4", "#ff7f0e"}
    assert {"#ff7f0e"} == {colour for colour, _ in strokes(other)} & {"#1f77b4", "#ff7f0e"}


def test_thinning_keeps_the_ends_and_every_outlier():
    points = [(float(step), math.sin(step / 50)) for step in range(10_000)]
    points[4321] = (4321.0, 99.0)
    points[7000] = (7000.0, -99.0)
    kept = thin(points, 1000)
    assert len(kept) <= 1000
    assert [x for x, _ in kept] == sorted(x for x, _ in kept)
    assert {points[4321], points[7000]} <= set(kept)
    assert (kept[0], kept[-1]) == (points[0], points[-1])
    assert thin(points[:1000], 1000) == points[:1000]
