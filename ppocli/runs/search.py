"""``sweep.search``: the jobs of a sweep whose values optuna draws or chooses, asked and told on a
journal in the sweep's folder.

Each job has a sampler of its own, seeded by its number: together with what the journal holds of
earlier jobs that decides its values, so a sweep that goes on chooses as it would have.
"""

from __future__ import annotations

import math
import os
import shlex
import signal
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from threading import Event, Thread
from typing import TYPE_CHECKING, Any

from ppocli.config import extras, keys, schema, tasks
from ppocli.errors import CheckpointError, ConfigError
from ppocli.runs.sweeps import JOURNAL, JobRecord, SweepRecord
from ppocli.storage import atomic, run_folder, run_logs
from ppocli.text import counted, finite_number

if TYPE_CHECKING:
    from optuna import Study
    from optuna.distributions import BaseDistribution
    from optuna.trial import Trial

STUDY = "sweep"
METRICS = "metrics"
"""attribute of the study: the names of what it is told"""
ENOUGH = 4
"""finished jobs from which on the importance of a key is told"""
STARTUP = 5
"""jobs that are drawn at random, and never stopped early, before earlier ones tell anything"""
_PAUSE = 0.5
"""seconds between two looks at the evaluations of a job"""
PRUNED = "pruned"


def load_optuna() -> Any:
    """The library, quiet.

    Raises:
        ConfigError: it isn't installed.
    """
    if not extras.installed("optuna"):
        raise ConfigError("Searching needs optuna, which is not installed.", where="sweep.search",
                          fix=extras.pip_line("optuna"))
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
                                   load_if_exists=True, pruner=optuna.pruners.MedianPruner(STARTUP))
    except Exception as error:  # whatever lines that are none of its own make it raise
        raise CheckpointError(f"the search can't be read: {type(error).__name__}: {error}",
                              where=str(folder / JOURNAL), fix="start another sweep") from error


def run_search(plan: schema.SweepConfig, ranges: Mapping[str, Any], folder: Path,
               make_job: Callable[[int, tuple[str, ...]], Any], start: Callable[[Any], None],
               result: Callable[[int], JobRecord], end: Callable[[int], None]) -> None:
    """Run the jobs that are left of ``plan.trials``, and tell the study what came of each.

    Of ``plan.jobs`` that run at a time it is told in their order, so that the values of a job
    depend on what came of the same earlier ones whichever of them ends first.

    Args:
        ranges, make_job: as of ``ppocli.config.sweep.Search``; jobs are its ``SweepJob``.
        start, result, end: start a job; wait for the end of that number; end it, where it runs on
            another machine.

    Raises:
        ConfigError: optuna isn't installed, or the settings of the search contradict each other.
        CheckpointError: the journal is damaged or of another search.
    """
    optuna = load_optuna()
    wanted = {name: distribution(name, each) for name, each in ranges.items()}
    first = make_job(0, tuple(f"{name}={_first(each)}" for name, each in wanted.items()))
    metrics, directions = objectives(plan, first.composed.config)
    study = open_study(folder, directions)
    told = study.user_attrs.get(METRICS, metrics), [each.name.lower() for each in study.directions]
    if told != (metrics, directions):
        raise ConfigError(f"this search is for {_aims(*told)}, not {_aims(metrics, directions)}",
                          where="sweep.metric",
                          fix="put back its metric and direction, or start another sweep")
    study.set_user_attr(METRICS, metrics)
    begun = study.get_trials(states=(optuna.trial.TrialState.RUNNING,))
    running: deque[tuple[Trial, Any, ExitStack]] = deque()
    with ExitStack() as watched:
        while True:
            while len(running) < plan.jobs and (
                    begun or len(study.get_trials(deepcopy=False)) < plan.trials):
                if begun:
                    frozen = begun.pop(0)
                    trial = optuna.trial.Trial(study, frozen._trial_id)
                    _check(frozen.params, wanted, folder)
                else:
                    number = len(study.get_trials(deepcopy=False))
                    study.sampler = _sampler(optuna, plan, number)
                    trial = study.ask(fixed_distributions=wanted)
                job = make_job(trial.number, tuple(f"{name}={_shown(trial.params[name], each)}"
                                                   for name, each in wanted.items()))
                watch = watched.enter_context(ExitStack())
                if plan.prune:
                    watch.enter_context(_stopping_early(trial, job, metrics[0], end))
                running.append((trial, job, watch))
                start(job)
            if not running:
                return
            trial, job, watch = running.popleft()
            record = result(job.number)
            watch.close()
            _tell(study, trial, record, job.folder, metrics)


def _tell(study: Study, trial: Trial, record: JobRecord, folder: Path, metrics: Sequence[str]
          ) -> None:
    """The figures of the evaluation after a job's training, or that it came to nothing, also where
    one of them is no finite number.

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
    if record.status == PRUNED:
        study.tell(trial, state=states.PRUNED)
    elif None not in values and record.status == "finished":
        study.tell(trial, values)
    else:
        study.tell(trial, state=states.FAIL)


def objectives(plan: schema.SweepConfig, config: schema.TrainConfig) -> tuple[list[str], list[str]]:
    """The figures that are searched for, and their directions.

    Raises:
        ConfigError: there is another number of directions than of metrics, or several to prune by.
    """
    metrics = [name.removeprefix("eval/") for name in
               keys.several(plan.metric) or [config.checkpoint.metric]]
    if plan.prune and len(metrics) > 1:
        raise ConfigError(f"sweep.prune=true goes by one metric, and there are {len(metrics)}",
                          where="sweep.prune, sweep.metric", fix="leave out sweep.prune, or give "
                          "one metric")
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


def _shown(value: Any, wanted: Any) -> str:
    """A value as a word; four digits are enough of a number from an interval, unless they leave it.

    Args:
        wanted: optuna's distribution that it is of.
    """
    if not isinstance(value, float) or hasattr(wanted, "choices"):
        return str(value)
    return next(text for digits in range(4, 18)
                if wanted.low <= float(text := f"{value:.{digits}g}") <= wanted.high)


def _first(wanted: Any) -> Any:
    return wanted.choices[0] if hasattr(wanted, "choices") else wanted.low


def findings(sweep: SweepRecord) -> dict[str, Any]:
    """What a search has found: for each metric the share of each key in what made jobs good
    (PED-ANOVA, arXiv 2304.10255), the jobs that no other outdoes in all metrics, best first, and
    the command of the first of them."""
    optuna, study = load_optuna(), open_study(sweep.folder)
    done = study.get_trials(states=(optuna.trial.TrialState.COMPLETE,))
    metrics = list(study.user_attrs.get(METRICS, ()))
    signs = [1 if each == optuna.study.StudyDirection.MINIMIZE else -1 for each in study.directions]
    importance = {}
    for place, name in enumerate(metrics if len(done) >= ENOUGH else ()):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that low values of a target count as good: so they do
            found = optuna.importance.get_param_importances(
                study, evaluator=optuna.importance.PedAnovaImportanceEvaluator(),
                target=lambda trial, place=place: signs[place] * trial.values[place])
        importance[name] = {key: round(share, 3) for key, share in found.items()}
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


def _check(params: Mapping[str, Any], wanted: Mapping[str, Any], folder: Path) -> None:
    """Refuse values of a begun job that the sweep's own words, which are signed, don't allow."""
    if params.keys() != wanted.keys() or not all(
            params[name] in each.choices if hasattr(each, "choices")
            else each.low <= params[name] <= each.high for name, each in wanted.items()):
        raise CheckpointError("the search has begun a job with values outside of its ranges.",
                              where=str(folder / JOURNAL), fix="start another sweep")


def _sampler(optuna: Any, plan: schema.SweepConfig, number: int) -> Any:
    seed = (plan.seed * 1_000_003 + number) % 2**32  # the most that NumPy takes
    return optuna.samplers.RandomSampler(seed) if plan.search == "random" else \
        optuna.samplers.TPESampler(n_startup_trials=STARTUP, seed=seed)


@contextmanager
def _stopping_early(trial: Trial, job: Any, metric: str, end: Callable[[int], None]
                    ) -> Iterator[None]:
    """Meanwhile report the evaluations of a job, and end it where optuna's pruner says so: by
    SIGTERM, so that it saves. What was reported before a kill counts once."""
    over = Event()
    reported = set[int]()

    def look() -> None:
        while not over.wait(_PAUSE):
            for row in run_logs.read_jsonl(run_folder.RunFolder(job.folder).metrics):
                value, step = finite_number(row.get(f"eval/{metric}")), int(row.get("step") or 0)
                if value is not None and step not in reported:
                    reported.add(step)
                    trial.report(value, step)
                    if step > 0 and trial.should_prune():
                        _end(job.folder, partial(end, job.number))
                        return

    thread = Thread(target=look, name="ppocli-pruning", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def _end(folder: Path, elsewhere: Callable[[], None]) -> None:
    """End the job of a folder, on this machine or ``elsewhere``, and note that this was wanted."""
    owner = run_folder.live_owner(folder)
    if owner is None and run_folder.other_host(folder) is None:
        return  # it has ended
    (folder / PRUNED).touch()
    if owner is None:
        elsewhere()
    else:
        with suppress(ProcessLookupError):
            os.kill(owner.pid, signal.SIGTERM)


def was_pruned(folder: Path) -> bool:
    """Whether :func:`run_search` has ended a job."""
    return (folder / PRUNED).exists()
