"""Curves of more points than a picture shows."""

import math

from ppocli.publish.curves import thin


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
