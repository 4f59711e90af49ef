"""A run that a user's own loop steps: its words and objects checked, its folder held."""

from __future__ import annotations

import itertools
import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ppocli.config import config_yaml, schema, tasks
from ppocli.distributed.launchers import find_launch, launched_world
from ppocli.errors import ConfigError, PpocliError
from ppocli.launch import external_launch
from ppocli.launch.launch import needs_launcher
from ppocli.launch.open_run_folder import open_folder

if TYPE_CHECKING:
    from ppocli.config.compose import Checked
    from ppocli.training.loop import Run
    from ppocli.training.task import PythonObjects

log = logging.getLogger("ppocli")
_loops = itertools.count()


class LoopScores:
    """A reward function that returns the scores that the loop was given."""

    display_name = "your loop"
    scores: Any = None

    def __call__(self, **columns: Any) -> Any:
        return self.scores


@contextmanager
def open_loop_run(overrides: Sequence[str] | Mapping[str, Any], objects: PythonObjects
                  ) -> Iterator[Run]:
    """A run that is ready for the next step, its folder held. The processes that a launcher has
    started call it together.

    Raises:
        ConfigError: the settings don't fit, or ask for processes that no launcher has started.
        PpocliError: something is missing, or can't be loaded or written.
    """
    from ppocli.launch.worker import run_for_loop

    launched, store = find_launch(os.environ), None
    with ExitStack() as stack:
        if launched is None or launched.world == 1:
            checked = _checked(overrides, objects)
            if needs_launcher(checked.config.hardware) or launched_world() > 1:
                raise ConfigError("PPOTrainer starts no other processes.",
                                  where="hardware.num_processes, WORLD_SIZE",
                                  fix="torchrun --nproc-per-node=N loop.py does; for one process: "
                                  "hardware.num_processes=1")
            start = stack.enter_context(open_folder(checked, objects, log.info))
        else:
            store = external_launch.open_store(launched, f"loop-{next(_loops)}")
            if not launched.first:
                if (published := external_launch.wait_for_start(store)) is None:
                    raise PpocliError("Rank 0 could not open the run.", where="RANK=0",
                                      fix="see its message")
                start = published
            else:
                try:
                    checked = external_launch.placed(_checked(overrides, objects), launched)
                    start = stack.enter_context(open_folder(checked, objects, log.info))
                except BaseException:
                    external_launch.publish_start(store, None)
                    raise
                external_launch.publish_start(store, replace(start, reserved_by=None))
        yield stack.enter_context(run_for_loop(start, objects, store))


def _checked(overrides: Sequence[str] | Mapping[str, Any], objects: PythonObjects) -> Checked:
    """The checked configuration of command-line words, and of objects in place of some.

    Raises:
        ConfigError: they are wrong.
    """
    from ppocli.config.command_words import given_words, read_words
    from ppocli.config.compose import check, compose

    words = read_words(given_words(overrides))
    if words.value("resume") in (None, "never", "auto"):  # the folder of a run has its models
        words = words.adding(*(f"{key}={config_yaml.quoted(config_yaml.PYTHON_OBJECT)}"
                               for name, key in config_yaml.MODEL_KEYS.items()
                               if getattr(objects, name) is not None))
    composed = compose(words)
    _check_fit(composed.config, objects)
    checked = check(composed, frozenset({"reward.fn"} | (
        {"prompts.path"} if objects.prompts is not None else set())))
    return checked if words.value("recipe") else replace(checked, name="loop")


def _check_fit(config: schema.TrainConfig, objects: PythonObjects) -> None:
    """Raise ConfigError for objects and settings that a user's own loop can't work with."""
    wrong = [text for broken, text in (
        *((model is not None and "PreTrainedModel" not in [k.__name__ for k in type(model).__mro__],
           f"{name}: a {type(model).__name__} is no language model of transformers; give the one "
           "below a value head (.pretrained_model), or the base of an adapter, and model.peft")
          for name, model in (("model", objects.model), ("ref_model", objects.ref_model))),
        (config.env.fn is not None, "env.fn: each sample of your own loop is one response"),
        (config.ppo.dynamic_sampling is not None,
         "ppo.dynamic_sampling: the loop chooses its samples itself"),
        (config.ppo.staleness > 0 or config.ppo.old_logprobs == "sampler"
         or tasks.corrects(config), "ppo.staleness, ppo.old_logprobs, ppo.importance: the "
         "samples of your own loop don't say which policy they come from"),
        (config.hardware.zero_stage > 0,
         "hardware.zero_stage: PPOTrainer holds whole weights on each process (DDP)")) if broken]
    if wrong:
        raise ConfigError("PPOTrainer can't work with this:\n  " + "\n  ".join(wrong),
                          where="PPOTrainer", fix="leave out what is named, or use ppocli train")
