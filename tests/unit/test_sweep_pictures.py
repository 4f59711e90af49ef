"""Which axes a picture of a sweep has, and where its jobs cross them."""

import pytest

from ppocli.errors import ConfigError
from ppocli.runs.pictures import Axis, axes_of, axis_of, draw_sweep
from ppocli.runs.sweeps import JobRecord


def job(number: int, *varied: str, reward: float | None, kl: float = 1.0) -> JobRecord:
    return JobRecord(number, varied, varied, "finished", 0, reward, kl, objective=reward,
                     figures={"reward": reward, "KL": kl})


@pytest.mark.parametrize(("values", "places", "ticks"), [
    (["1", "3", "2"], [0.0, 1.0, 0.5], [(0.0, "1"), (1.0, "3")]),
    (["1e-5", "1e-3", "1e-4"], [0.0, 1.0, 0.5], [(0.0, "1e-05"), (1.0, "0.001")]),  # logarithms
    (["gae", "rloo", "grpo"], [0.0, 1.0, 0.5], [(0.0, "gae"), (0.5, "grpo"), (1.0, "rloo")]),
    (["7", "7"], [0.0, 0.0], [(0.0, "7")]),
    (["1", "null"], [0.0, 1.0], [(0.0, "1"), (1.0, "null")])])
def test_axes_of_numbers_decades_and_words(values, places, ticks):
    assert axis_of("k", values) == Axis("k", pytest.approx(places), ticks)


def test_jobs_are_drawn_best_first_and_only_those_with_figures():
    jobs = [job(0, "a.b=1", "c=x", reward=0.5), job(1, "a.b=2", "c=y", reward=None),
            job(2, "a.b=3", "c=x", reward=0.9, kl=2.0)]
    axes, told = axes_of(jobs)
    assert [one.number for one in told] == [2, 0]
    assert {axis.name: axis.places for axis in axes} == {
        "a.b": [1.0, 0.0], "c": [0.0, 0.0], "reward": [1.0, 0.0], "KL": [1.0, 0.0]}
    drawn = draw_sweep(jobs, {"reward_mean": {"a.b": 0.8, "c": 0.2}}, "svg").decode()
    assert all(text in drawn for text in ("2 jobs", "80%", "share of each key in reward_mean"))
    assert draw_sweep(jobs, {}, "png").startswith(b"\x89PNG")
    with pytest.raises(ConfigError, match="Fewer than two jobs"):
        axes_of(jobs[:2])
