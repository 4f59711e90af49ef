"""``sweep.search``: optuna chooses the values of the jobs, with a journal in the sweep's folder.

Jobs come in batches of as many as run at a time. The seed of a job's sampler is its number, and the
sampler sees the results of all earlier batches, so the values of a job depend neither on the order
in which jobs end nor on whether the sweep was interrupted.
"""

from __future__ import annotations

import math
import shlex
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ppocli.config import import_guard, keys, schema, tasks
from ppocli.config.text import counted, finite_number
from ppocli.errors import CheckpointError, ConfigError
from ppocli.runs import atomic, run_folder
from ppocli.runs.sweeps import JOURNAL, JobRecord, SweepRecord

if TYPE_CHECKING:
    from optuna import Study
    from optuna.distributions import BaseDistribution
    from optuna.trial import Trial

STUDY = "sweep"
METRICS = "metrics"
"""attribute of the study: the names of its metrics"""
ENOUGH = 4
"""the importance of keys is computed from this many finished jobs on"""
STARTUP = 5
"""jobs with random values, before the sampler learns from earlier ones"""


def load_optuna() -> Any:
    """The library, quiet.

    Raises:
        ConfigError: it isn't installed.
    """
    if not import_guard.installed("optuna"):
        raise ConfigError("Searching needs optuna, which is not installed.", where="sweep.search",
                          fix=import_guard.pip_line("optuna"))
    import optuna

    optuna.logging.set_verbosity(optuna.logging.ERROR)
    return optuna


def open_study(folder: Path, directions: Sequence[str] | None = None) -> Study:
    """The study of a sweep; made where ``directions`` are given and there is none yet."""
    optuna = load_optuna()
    journal = optuna.storages.journal.JournalFileBackend(str(folder / JOURNAL))
    storage = optuna.storages.JournalStorage(journal)
    try:
        if directions is None:
            return optuna.load_study(study_name=STUDY, storage=storage)
        return optuna.create_study(study_name=STUDY, storage=storage, directions=list(directions),
                                   load_if_exists=True)
    except Exception as error:  # whatever lines that are none of its own make it raise
        raise CheckpointError(f"the search can't be read: {type(error).__name__}: {error}",
                              where=str(folder / JOURNAL), fix="start another sweep") from error


def run_search(plan: schema.SweepConfig, ranges: Mapping[str, Any], folder: Path, batch_size: int,
               make_job: Callable[[int, tuple[str, ...]], Any],
               run_batch: Callable[[Sequence[Any]], None], result: Callable[[int], JobRecord]
               ) -> None:
    """Run the remaining jobs of ``plan.trials`` in batches, and report their figures to the study.

    Args:
        ranges, make_job: see ``ppocli.config.hydra_sweep.Search``; a job is its ``SweepJob``.
        batch_size: number of jobs that run at a time.
        run_batch: runs jobs of consecutive numbers, and returns when all have ended.
        result: the record of a job that has ended.

    Raises:
        ConfigError: optuna isn't installed, or the settings of the search contradict each other.
        CheckpointError: the journal is damaged or belongs to another search.
    """
    optuna = load_optuna()
    distributions = {name: distribution(name, each) for name, each in ranges.items()}
    first = make_job(0, tuple(f"{name}={_first(each)}" for name, each in distributions.items()))
    metrics, directions = objectives(plan, first.composed.config)
    study = open_study(folder, directions)
    before = study.user_attrs.get(METRICS, metrics), [each.name.lower()
                                                      for each in study.directions]
    if before != (metrics, directions):
        raise ConfigError(f"this search is for {_aims(*before)}, not {_aims(metrics, directions)}",
                          where="sweep.metric",
                          fix="put back its metric and direction, or start another sweep")
    study.set_user_attr(METRICS, metrics)
    while True:
        trials = [_begun_trial(study, frozen, distributions, folder) for frozen in
                  study.get_trials(states=(optuna.trial.TrialState.RUNNING,))]
        count = len(study.get_trials(deepcopy=False))
        start = trials[0].number if trials else count
        # after an interruption, too, a batch ends where it would have ended
        for number in range(count, min(start - start % batch_size + batch_size, plan.trials)):
            study.sampler = _sampler(optuna, plan, number)
            trials.append(study.ask(fixed_distributions=distributions))
        if not trials:
            return
        run_batch([make_job(trial.number, tuple(f"{name}={_shown(trial.params[name], each)}"
                                                for name, each in distributions.items()))
                   for trial in trials])
        for trial in trials:
            _tell(study, trial, result(trial.number), folder / str(trial.number), metrics)


def _begun_trial(study: Study, frozen: Any, distributions: Mapping[str, Any], folder: Path
                 ) -> Trial:
    """A trial that an earlier call has begun.

    Raises:
        CheckpointError: the sweep's own words, which are signed, don't allow its values.
    """
    if frozen.params.keys() != distributions.keys() or not all(
            frozen.params[name] in each.choices if hasattr(each, "choices")
            else each.low <= frozen.params[name] <= each.high
            for name, each in distributions.items()):
        raise CheckpointError("the search has begun a job with values outside of its ranges.",
                              where=str(folder / JOURNAL), fix="start another sweep")
    return load_optuna().trial.Trial(study, frozen._trial_id)


def _tell(study: Study, trial: Trial, record: JobRecord, folder: Path, metrics: Sequence[str]
          ) -> None:
    """Report the figures of the evaluation after a job's training; the trial has failed if the job
    has, or if a figure isn't finite.

    Raises:
        ConfigError: a finished job has no such figure.
    """
    states = load_optuna().trial.TrialState
    summary = atomic.read_json(run_folder.RunFolder(folder).summary) or {}
    after = summary.get("eval_after") or {}
    values: list[Any] = [finite_number(after.get(name)) for name in metrics]
    missing = [name for name in metrics if name not in after]
    if missing and record.status == "finished":
        raise ConfigError(f"{missing[0]} is not among the figures of job {record.number}'s "
                          f"evaluation: {', '.join(after) or 'it has none'}.",
                          where="sweep.metric", fix="start another sweep, with " + (
                              "one of them" if after else "an evaluation (data.val)"))
    if None not in values and record.status == "finished":
        study.tell(trial, values)
    else:
        study.tell(trial, state=states.FAIL)


def objectives(plan: schema.SweepConfig, config: schema.TrainConfig) -> tuple[list[str], list[str]]:
    """The metrics of a search, and their directions.

    Raises:
        ConfigError: the numbers of directions and metrics differ.
    """
    metrics = [name.removeprefix("eval/") for name in
               keys.several(plan.metric) or [config.checkpoint.metric]]
    lower = {"kl_mean", "loss", *tasks.kind_of(config).lower_is_better}
    directions = keys.several(plan.direction) or [
        "minimize" if name in lower else "maximize" for name in metrics]
    if len(directions) != len(metrics):
        raise ConfigError(f"sweep.direction: {counted(len(directions), 'direction')} for "
                          f"{counted(len(metrics), 'metric')}", where="sweep.direction",
                          fix="give one for each metric, as sweep.direction=[maximize,minimize]")
    return metrics, directions


def _aims(metrics: Sequence[str], directions: Sequence[str]) -> str:
    return " and ".join(f"{name} ({way})" for name, way in zip(metrics, directions, strict=False))


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


def _shown(value: Any, distribution: Any) -> str:
    """A value as a word: a number of an interval has four digits, or as many as keep it inside."""
    if not isinstance(value, float) or hasattr(distribution, "choices"):
        return str(value)
    return next(text for digits in range(4, 18)
                if distribution.low <= float(text := f"{value:.{digits}g}") <= distribution.high)


def _first(distribution: Any) -> Any:
    return distribution.choices[0] if hasattr(distribution, "choices") else distribution.low


def findings(sweep: SweepRecord) -> dict[str, Any]:
    """The results of a search: for each metric the importance of each key (PED-ANOVA, arXiv
    2304.10255), the Pareto-optimal jobs, best first, and the command of the first of them."""
    optuna, study = load_optuna(), open_study(sweep.folder)
    done = study.get_trials(states=(optuna.trial.TrialState.COMPLETE,))
    metrics = list(study.user_attrs.get(METRICS, ()))
    signs = [1 if each == optuna.study.StudyDirection.MINIMIZE else -1 for each in study.directions]
    importance = {}
    for place, name in enumerate(metrics if len(done) >= ENOUGH else ()):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that low values of a target count as good: so they do
            shares = optuna.importance.get_param_importances(
                study, evaluator=optuna.importance.PedAnovaImportanceEvaluator(),
                target=lambda trial, place=place: signs[place] * trial.values[place])
        importance[name] = {key: round(share, 3) for key, share in shares.items()}
    jobs = {job.number: job for job in sweep.jobs}
    best = [(trial, jobs[trial.number]) for trial in study.best_trials if trial.number in jobs] \
        if done else []
    best.sort(key=lambda each: signs[0] * each[0].values[0])
    return {"importance": importance, "best": [
        {"job": job.number, "varied": list(job.varied),
         "metrics": dict(zip(metrics, trial.values, strict=True))} for trial, job in best],
        "command": None if not best else shlex.join(["ppocli", "train", *(
            word for word in best[0][1].overrides
            if not word.startswith(("resume=", "run_name="))), *_flags(sweep.words)])}


def _flags(words: Sequence[str]) -> list[str]:
    """The flags of a sweep, and their values, that one of its jobs needs too."""
    return [word for word in words if word not in ("-m", "--multirun", "--") and (
        word.startswith("-") or ("=" not in word and not word.startswith("~")))]


def _sampler(optuna: Any, plan: schema.SweepConfig, number: int) -> Any:
    seed = (plan.seed * 1_000_003 + number) % 2**32  # the most that NumPy takes
    return optuna.samplers.RandomSampler(seed) if plan.search == "random" else \
        optuna.samplers.TPESampler(n_startup_trials=STARTUP, seed=seed)
