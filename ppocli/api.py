"""ppocli from Python: ``ppocli.train([...])`` with words as on the command line and Python objects.

It composes, launches and trains with the same code as the command line.
"""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ppocli.config import command_words, config_yaml, resume_policy
from ppocli.config.command_words import list_of_texts
from ppocli.config.import_guard import join_working_directory
from ppocli.config.text import Say
from ppocli.data.sources import as_list
from ppocli.distributed.ranks import StopFlag
from ppocli.distributed.stop import catch_signals
from ppocli.errors import ConfigError, InputError
from ppocli.evaluation.eval_request import SAMPLES, EvalRequest
from ppocli.launch import launch, open_run_folder, target_config
from ppocli.runs import trust as trust_of
from ppocli.runs.atomic import read_json
from ppocli.runs.model_files import quiet_transformers, trained_with_template
from ppocli.runs.target import find_target

if TYPE_CHECKING:
    from ppocli.evaluation.run_evaluation import Watch
    from ppocli.training.task import PythonObjects

log = logging.getLogger("ppocli")


@dataclass(frozen=True)
class TrainedRun:
    """A finished run: its folder, its results, and its policy."""

    run_dir: Path
    model_dir: Path
    """a plain Hugging Face folder"""
    summary: dict[str, Any]
    """the contents of summary.json"""
    trusts: bool = False
    """code that the model brings may run, whoever made the run"""

    @cached_property
    def _player(self) -> Any:
        from ppocli.evaluation.player import load_player
        from ppocli.models.loading.model_config import policy_config

        cfg = config_yaml.read_config(self.run_dir / "config.yaml")
        trust_of.check_run(self.run_dir, cfg, ("model.",), trusts=self.trusts)
        return load_player(policy_config(cfg.model, str(self.model_dir)), str(self.run_dir))

    def generate(self, prompts: Sequence[str], *, seed: int = 0, chat: bool | None = None,
                 **sampling: Any) -> list[str]:
        """One response for each prompt, sampled as in training.

        Args:
            prompts: texts.
            seed: equal seeds give equal responses.
            chat: whether the chat template renders prompts (default: as in training).
            sampling: overrides: max_new_tokens, min_new_tokens, temperature, top_k, top_p, min_p,
                repetition_penalty, do_sample, stop_sequences, ignore_eos.

        Raises:
            ConfigError: an unknown override, or prompts that are no list of texts.
        """
        from ppocli.evaluation.player import changed_sampling

        cfg = config_yaml.read_config(self.run_dir / "config.yaml")
        generation = changed_sampling(cfg, sampling)
        texts = list_of_texts(prompts, "prompts")
        if not texts:
            raise ConfigError("There are no prompts.", fix="give at least one text")
        if chat is None:
            chat = bool(cfg.prompts.chat or trained_with_template(str(self.model_dir)))
        tokens = self._player.tokens(self._player.render(texts, chat=chat), generation, chat=chat)
        return [answer.text for batch in self._player.answers(tokens, generation, seed=seed)
                for answer in batch]

    def save_pretrained(self, folder: str | Path) -> Path:
        """Copy the trained model's folder to ``folder``, which must not exist or be empty.

        Raises:
            ConfigError: the folder holds something.
        """
        target = free_folder(folder)
        shutil.copytree(self.model_dir, target, dirs_exist_ok=True)
        return target


def free_folder(folder: str | Path) -> Path:
    """The path of a folder that can be written to.

    Raises:
        ConfigError: it holds something.
    """
    target = Path(folder)
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise ConfigError(f"{target} exists already and isn't empty; nothing is overwritten.",
                          fix="name another folder")
    return target


def train(overrides: Sequence[str] | Mapping[str, Any] = (), *,
          model_path: str | Path | None = None, config: Mapping[str, Any] | None = None,
          reward_fn: Callable[..., Any] | Mapping[str, Callable[..., Any]] | None = None,
          metric_fn: Callable[..., Any] | None = None, prompts: Sequence[Any] | None = None,
          eval_prompts: Sequence[Any] | None = None, stop_sequences: Sequence[str] | None = None
          ) -> TrainedRun:
    """Train a policy in this process, as ``ppocli train`` does.

    Args:
        overrides: words of the command line, e.g. ``["+recipe=quickstart", "seed=1"]``; or a nested
            mapping of settings, e.g. ``{"recipe": "quickstart", "ppo": {"n": 2}}``.
        model_path: sets ``model.path``.
        config: a nested mapping of settings, which takes precedence over ``overrides``.
        reward_fn: in place of ``reward.fn``: a callable, or several by name (each of weight 1).
        metric_fn: in place of ``reward.metric_fn``.
        prompts, eval_prompts: in place of the ``prompts`` section's sources: texts, or mappings
            with a ``prompt`` and metadata.
        stop_sequences: in place of ``generation.stop_sequences``.

    Raises:
        PpocliError: whatever ended the run; its checkpoints are kept.
    """
    return _run((), overrides, config, model_path, {
        "reward_fn": reward_fn, "metric_fn": metric_fn, "prompts": prompts,
        "eval_prompts": eval_prompts}, stop_sequences)


def sft(overrides: Sequence[str] | Mapping[str, Any] = (), *, model_path: str | Path | None = None,
        config: Mapping[str, Any] | None = None, data: Any = None, val_data: Any = None,
        stop_sequences: Sequence[str] | None = None) -> TrainedRun:
    """Fine-tune a model on examples in this process, as ``ppocli sft`` does.

    Example::

        run = ppocli.sft(["sft.epochs=3", "data.val=0.1"], model_path="gpt2",
                         data=[{"prompt": "The film was", "completion": " great."}, ...])
        ppocli.train(["+recipe=..."], model_path=run.model_dir, reward_fn=score)

    Args:
        overrides, model_path, config, stop_sequences: as of :func:`train`.
        data: a list in place of ``data.path``: texts, or mappings with the columns of a file.
        val_data: the same in place of ``data.val``.

    Raises:
        PpocliError: whatever ended the run; its checkpoints are kept.
    """
    return _run(("task=sft",), overrides, config, model_path,
                {"data": data, "val_data": val_data}, stop_sequences)


def train_reward_model(overrides: Sequence[str] | Mapping[str, Any] = (), *,
                       model_path: str | Path | None = None,
                       config: Mapping[str, Any] | None = None, data: Any = None,
                       val_data: Any = None) -> TrainedRun:
    """Train a reward model on pairs in this process, as ``ppocli reward-model`` does.

    Example::

        run = ppocli.train_reward_model(["data.val=0.1"], model_path="runs/sft", data=[
            {"prompt": "The film was", "chosen": " great.", "rejected": " dull."}, ...])
        run.summary["eval_after"]["accuracy"]

    Args:
        overrides, model_path, config: as of :func:`train`.
        data: a list in place of ``data.path``: mappings with ``chosen``, ``rejected`` and, unless
            both begin with it, ``prompt``.
        val_data: the same in place of ``data.val``.

    Raises:
        PpocliError: whatever ended the run; its checkpoints are kept.
    """
    return _run(("task=reward_model",), overrides, config, model_path,
                {"data": data, "val_data": val_data})


def _run(task: tuple[str, ...], overrides: Sequence[str] | Mapping[str, Any],
         config: Mapping[str, Any] | None, model_path: str | Path | None, objects: dict[str, Any],
         stop_sequences: Sequence[str] | None = None) -> TrainedRun:
    """Compose, launch, and open the finished run; ``objects`` are Python objects by their names in
    ``PythonObjects``."""
    from ppocli.config import compose
    from ppocli.training.task import PythonObjects

    rows = ("prompts", "eval_prompts", "data", "val_data")
    objects = {name: as_list(value, name, name) if name in rows else value
               for name, value in objects.items() if value is not None}
    handed_in = frozenset(resume_policy.OBJECT_KEYS[name] for name in objects)
    given_words = [*command_words.given_words(overrides), *command_words.given_words(config or {})]
    if model_path is not None:
        given_words += command_words.given_words({"model": {"path": str(model_path)}})
    read = command_words.read_words(given_words)
    if read.value("resume") in (None, "never", "auto"):  # else the run knows its task
        read = command_words.read_words([*task, *given_words])
    composed = compose.compose(read)
    replaced = composed.config.reward.fn if "reward_fn" in objects else None
    arguments = [word for word in read.overrides if word.lstrip("+").startswith("reward.kwargs")
                 and word.partition("=")[2] not in ("{}", "null")]
    if arguments and replaced not in (None, config_yaml.PYTHON_OBJECT):
        raise ConfigError(f"{arguments[0]} would go to {replaced}, which reward_fn replaces.",
                          where="reward.kwargs", fix="put reward=null before it")
    if stop_sequences is not None:
        composed = replace(composed, config=config_yaml.with_values(composed.config, {
            "generation.stop_sequences": list_of_texts(stop_sequences, "stop_sequences")}))
    caller = launch.Caller(objects=PythonObjects(**objects) if objects else None)
    outcome = launch.launch(compose.check(composed, handed_in), caller)
    return load_run(outcome.run_dir, trust=True)


@dataclass(frozen=True)
class EvalResult:
    """A finished evaluation: its results and its folder."""

    folder: Path
    samples: Path
    """one JSON object a response"""
    figures: dict[str, float | None]
    """of the policy, by the names in a run's ``eval_after``; None if there is no value"""
    stderr: dict[str, float | None]
    against: dict[str, float | None] | None
    """figures of the model that it was compared with"""
    win_rate: dict[str, Any] | None
    report: dict[str, Any]
    """the contents of eval.json"""


def evaluate(run: str | Path | None = None, overrides: Sequence[str] = (), *,
             against: str | Path | None = None, reward: str | None = None,
             reward_fn: Callable[..., Any] | Mapping[str, Callable[..., Any]] | None = None,
             metric_fn: Callable[..., Any] | None = None,
             prompts: str | Path | Sequence[Any] | None = None, limit: int | None = None,
             num_samples: int | None = None, seed: int | None = None, step: int | None = None,
             best: bool = False, frontier: bool = False, output: str | Path | None = None,
             name: str | None = None, overwrite: bool = False, trust: bool = False) -> EvalResult:
    """Evaluate a policy in this process, as ``ppocli eval`` does.

    Args:
        run: a run, a checkpoint, a model folder or a Hub name (default: the newest run below
            runs/).
        overrides: words KEY=VALUE over the run's settings.
        against: another such target, or ``base``.
        reward: in place of the run's rewards, by its import path or name, without their arguments.
        reward_fn: likewise, as an object: a callable, or several by name (each of weight 1).
        metric_fn: in place of ``reward.metric_fn``.
        prompts: a file, a folder or a Hub data set; or the prompts themselves, texts or mappings
            with a ``prompt`` and metadata.
        limit, num_samples, seed, step, best, frontier, output, name, overwrite, trust: the flags
            of ``ppocli eval``.

    Raises:
        PpocliError: whatever kept the evaluation from its end; samples scored so far are kept.
    """
    from ppocli.training.task import PythonObjects

    source, items = (prompts, None) if prompts is None or isinstance(prompts, str | Path) else (
        None, as_list(prompts, "prompts", "prompts"))
    request = EvalRequest(
        run=_text(run), words=tuple(list_of_texts(overrides, "overrides")), against=_text(against),
        reward=reward, prompts=_text(source), limit=limit, num_samples=num_samples, seed=seed,
        step=step, best=best, frontier=frontier, output=_text(output), name=name,
        overwrite=overwrite, trust=trust, own_reward=reward_fn is not None,
        own_prompts=items is not None)
    objects = PythonObjects(reward_fn=reward_fn, metric_fn=metric_fn, eval_prompts=items)
    join_working_directory()
    quiet_transformers()
    folder, report = carry_out(request, catch_signals(), log.info, objects)
    return EvalResult(folder, folder / SAMPLES, report["figures"], report["stderr"],
                      report["against"] and report["against"]["figures"], report["win_rate"],
                      report)


def carry_out(request: EvalRequest, working: AbstractContextManager[StopFlag], say: Say,
              objects: PythonObjects | None = None,
              watching: AbstractContextManager[Watch] | None = None
              ) -> tuple[Path, dict[str, Any]]:
    """Do what :func:`evaluate` or ``ppocli eval`` was asked for.

    Args:
        working: entered once everything has been checked that takes no model.
        say: told what was chosen where the user left it open.
        objects: Python objects in place of reward, metric and prompts.
        watching: what watches the samples of a policy come.

    Returns:
        the folder, and the contents of its eval.json.

    Raises:
        PpocliError: whatever kept the evaluation from its end; samples scored so far are kept.
    """
    target = find_target(request.run, say=say, step=request.step, best=request.best)
    on_rows = request.on_rows(target_config.trained_on_data(target))
    cfg = target_config.data_config(target, request.row_words(), trusts=request.trust, say=say) \
        if on_rows else target_config.target_config(
            target, request.overrides(target), needs_reward=True,
            needs_prompts=not request.own_prompts, trusts=request.trust, say=say)
    if request.own_reward:  # reward.kwargs are this function's
        cfg = config_yaml.with_values(cfg, {"reward.fn": None})
    cfg = config_yaml.with_absolute_paths(cfg)
    with working as stop:
        from ppocli.evaluation.run_evaluation import evaluate_rows, run_evaluation
        from ppocli.training.task import PythonObjects

        if on_rows:
            return evaluate_rows(request, target, cfg, stop=stop)
        objects = objects or PythonObjects()
        with watching or nullcontext(lambda role, count, total: None) as watch:
            return run_evaluation(request, target, open_run_folder.noting_objects(cfg, objects),
                                  objects, stop=stop, watch=watch)


def _text(value: str | Path | None) -> str | None:
    return None if value is None else str(value)


def load_run(run_dir: str | Path, *, trust: bool = False) -> TrainedRun:
    """Open a finished run's folder.

    Args:
        trust: code that the model brings may run, though somebody else has made the run.

    Raises:
        InputError: it holds no finished run.
        CheckpointError: its config.yaml can't be read.
    """
    folder = Path(run_dir).resolve()
    if (summary := read_json(folder / "summary.json")) is None:
        raise InputError(f"{folder} holds no summary.json of a run.", where=str(folder),
                         fix="name the folder of a finished run")
    if summary.get("status") != "finished":
        config = config_yaml.read_config(folder / config_yaml.CONFIG_FILE)
        raise InputError(f"The run in {folder} is {summary.get('status')}, not finished.",
                         where=str(folder), fix=resume_policy.how_to_resume(config, folder))
    return TrainedRun(folder, folder / "model", summary, trust)
