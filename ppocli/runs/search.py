"""``sweep.search``: optuna chooses the values of the jobs.

Jobs come in batches of as many as run at a time. Before each batch a study is made of the values
and results of all earlier jobs, as ``sweep.json`` and the run folders have them, and the seed of a
job's sampler is its number. So the values of a job depend neither on the order in which jobs end
nor on whether the sweep was interrupted.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from ppocli.config import import_guard, keys, schema, tasks
from ppocli.config.text import counted
from ppocli.errors import ConfigError
from ppocli.runs.sweeps import SweepRecord, finished_figures, job_now, varied_values, write_sweep

if TYPE_CHECKING:
    from optuna import Study
    from optuna.distributions import BaseDistribution

STARTUP = 5
"""jobs with random values, before the sampler learns from earlier ones"""


def load_optuna() -> Any:
    """The library, quiet.

    Raises:
        InputError: it isn't installed.
    """
    import_guard.require("optuna", "Searching", "sweep.search")
    import optuna

    optuna.logging.set_verbosity(optuna.logging.ERROR)
    return optuna


@dataclass(frozen=True, slots=True)
class Search:
    """The metrics of a search, with ``minimize`` or ``maximize`` for each, and its ranges."""

    directions: Mapping[str, str]
    ranges: Mapping[str, BaseDistribution]

    @classmethod
    def of(cls, config: schema.TrainConfig, swept: Mapping[str, Any]) -> Search:
        """The search that a sweep's words ask for.

        Args:
            config: of the first job.
            swept: the swept words in Hydra's grammar, by key.

        Raises:
            ConfigError: an empty range, or as many metrics as directions aren't there.
            InputError: optuna isn't installed.
        """
        return cls(directions_of(config), {name: distribution(name, each)
                                           for name, each in swept.items()})

    @classmethod
    def read(cls, written: Mapping[str, Any]) -> Search:
        """What :attr:`written` has written."""
        read = load_optuna().distributions.json_to_distribution
        return cls(written["directions"],
                   {name: read(text) for name, text in written["ranges"].items()})

    @property
    def written(self) -> dict[str, Any]:
        """The same for ``sweep.json``."""
        write = load_optuna().distributions.distribution_to_json
        return {"directions": dict(self.directions),
                "ranges": {name: write(each) for name, each in self.ranges.items()}}

    def study(self, sweep: SweepRecord) -> Study:
        """A study of the sweep's jobs: those that have ended without a finite figure have failed.

        Raises:
            ConfigError: a finished job has no such figure.
        """
        optuna = load_optuna()
        study = optuna.create_study(directions=list(self.directions.values()))
        for number, varied in enumerate(sweep.jobs):
            figures = finished_figures(job_now(sweep, number))
            values = None if figures is None else [figures.get(name) for name in self.directions]
            if figures is not None and (missing := self.directions.keys() - figures.keys()):
                raise ConfigError(f"{missing.pop()} is not among the figures of job {number}'s "
                                  f"evaluation: {', '.join(figures) or 'it has none'}.",
                                  where="sweep.metric", fix="start another sweep, with " + (
                                      "one of them" if figures else "an evaluation (data.val)"))
            done = values is not None and None not in values
            texts = varied_values(varied)
            study.add_trial(optuna.trial.create_trial(
                state=optuna.trial.TrialState.COMPLETE if done else optuna.trial.TrialState.FAIL,
                values=values if done else None, distributions=dict(self.ranges),
                params={name: _value(texts[name], each) for name, each in self.ranges.items()}))
        return study

    def batches(self, sweep: SweepRecord, plan: schema.SweepConfig, size: int
                ) -> Iterator[tuple[SweepRecord, Sequence[int]]]:
        """The numbers of the jobs to run next, and the sweep with them in it, which is written to
        its folder: first those that an earlier call has begun, then new ones, ``size`` at a time.

        Raises:
            ConfigError: as :meth:`study`.
        """
        optuna = load_optuna()
        yield sweep, [number for number in range(len(sweep.jobs))
                      if job_now(sweep, number).status not in ("finished", "failed")]
        while (count := len(sweep.jobs)) < plan.trials:
            study, jobs = self.study(sweep), list(sweep.jobs)
            for number in range(count, min(count + size, plan.trials)):
                seed = (plan.seed * 1_000_003 + number) % 2**32  # the most that NumPy takes
                study.sampler = optuna.samplers.RandomSampler(seed) if plan.search == "random" \
                    else optuna.samplers.TPESampler(n_startup_trials=STARTUP, seed=seed)
                values = study.ask(fixed_distributions=dict(self.ranges)).params
                jobs.append(tuple(f"{name}={_text(values[name], each)}"
                                  for name, each in self.ranges.items()))
            sweep = replace(sweep, jobs=tuple(jobs))
            write_sweep(sweep)
            yield sweep, range(count, len(jobs))
        self.study(sweep)


def directions_of(config: schema.TrainConfig) -> dict[str, str]:
    """The metrics of a search, and their directions.

    Raises:
        ConfigError: the numbers of directions and metrics differ.
    """
    plan = config.sweep
    metrics = [name.removeprefix("eval/") for name in
               keys.several(plan.metric) or [config.checkpoint.metric]]
    lower = {"kl_mean", "loss", *tasks.kind_of(config).lower_is_better}
    directions = keys.several(plan.direction) or [
        "minimize" if name in lower else "maximize" for name in metrics]
    if len(directions) != len(metrics):
        raise ConfigError(f"sweep.direction: {counted(len(directions), 'direction')} for "
                          f"{counted(len(metrics), 'metric')}", where="sweep.direction",
                          fix="give one for each metric, as sweep.direction=[maximize,minimize]")
    return dict(zip(metrics, directions, strict=True))


def distribution(name: str, override: Any) -> BaseDistribution:
    """A range in Hydra's grammar as optuna's: ``choice(a,b)``, ``range(1,9,2)``,
    ``interval(0,1)``, ``tag(log,interval(1e-5,1e-3))``; whole numbers where the key takes them.

    Raises:
        ConfigError: nothing lies in the range, or it has no logarithm.
    """
    distributions, swept = load_optuna().distributions, override.value()
    log, key = "log" in swept.tags, keys.key_for(name)
    whole = key is not None and key.item is int
    if override.is_interval_sweep():
        low, high = swept.start, swept.end
    elif (values := list(override.sweep_string_iterator())) and not (
            override.is_range_sweep() and whole and log):
        return distributions.CategoricalDistribution(values)
    else:
        low, high = (min(map(float, values)), max(map(float, values))) if values else (1, 0)
    if whole and math.isfinite(high - low):
        low, high = math.ceil(low), math.floor(high)
    if not math.isfinite(high - low) or low > high or (log and low <= 0):
        raise ConfigError(f"{override.input_line}: there is nothing in that range to choose from",
                          where=name, fix="let it go from LOW up to HIGH, with tag(log,...) from "
                          "above 0" + ", with a whole number in it" * whole)
    kind = distributions.IntDistribution if whole else distributions.FloatDistribution
    return kind(low, high, log=log)


def _text(value: Any, distribution: Any) -> str:
    """A value as a word: a number of an interval has four digits, or as many as keep it inside."""
    if not isinstance(value, float) or hasattr(distribution, "choices"):
        return str(value)
    return next(text for digits in range(4, 18)
                if distribution.low <= float(text := f"{value:.{digits}g}") <= distribution.high)


def _value(text: str, distribution: Any) -> Any:
    """The value of a word."""
    return text if hasattr(distribution, "choices") else type(distribution.low)(text)


def findings(sweep: SweepRecord) -> dict[str, Any]:
    """The results of a search: the Pareto-optimal jobs, best first."""
    assert sweep.search is not None
    optuna, search = load_optuna(), Search.read(sweep.search)
    study, metrics = search.study(sweep), list(search.directions)
    done = study.get_trials(states=(optuna.trial.TrialState.COMPLETE,))
    sign = 1 if search.directions[metrics[0]] == "minimize" else -1
    best = sorted(study.best_trials if done else (), key=lambda trial: sign * trial.values[0])
    return {"best": [
        {"job": trial.number, "varied": list(sweep.jobs[trial.number]),
         "metrics": dict(zip(metrics, trial.values, strict=True))} for trial in best]}

