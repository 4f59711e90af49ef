import pytest

from ppocli.runs.faults import Fault, Point, parse


def test_parse():
    inf = float("inf")
    assert parse("") == ()
    assert parse("save.open:kill9, rollout.token@7:term,a@2+:sleep=0.5,a.b>3@2#1:oom") == (
        Fault("save.open", "kill9", 1, inf, 60), Fault("rollout.token", "term", 7, 7, 60),
        Fault("a", "sleep", 2, inf, 0.5), Fault("a.b", "oom", 2, 2, 60, 1, 3))


def test_rows_decide_where_a_fault_asks_for_more_than_some():
    point = Point(parse("a>2:nan"))
    assert [point("a", rows) for rows in (1, 2, 3)] == [False, False, True]
    assert not point("a")


def test_passes_are_counted_per_point():
    point = Point(parse("a@2:nan,b@2+:nan,c:raise,d:enospc"))
    assert [point("a") for _ in range(4)] == [False, True, False, False]
    assert [point("b") for _ in range(4)] == [False, True, True, True]
    assert point("other") is False
    with pytest.raises(RuntimeError, match="injected fault at c"):
        point("c")
    with pytest.raises(OSError, match="No space left") as full:
        point("d")
    assert full.value.errno == 28


def test_a_fault_of_one_rank_happens_in_no_other():
    assert [Point(parse("a#1:nan,b#0:nan"), rank)(name) for rank in (0, 1) for name in "ab"] == [
        False, True, True, False]
