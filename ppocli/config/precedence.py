"""Settings of files that give way to typed words, and values of a group that a recipe replaces."""

from collections.abc import Iterable, Mapping
from itertools import pairwise
from typing import Any

from omegaconf import DictConfig

from ppocli.builtin.names import config_groups
from ppocli.config.command_words import COMMAND_LINE, Words
from ppocli.config.hydra_bridge import Entry
from ppocli.config.tasks import DATA_TASKS
from ppocli.config.text import shown

LENGTHS = {"ppo": ("total_episodes", "epochs", "num_steps"),
           **dict.fromkeys(DATA_TASKS, ("epochs", "num_updates"))}
"""section -> the keys that set the length of a run, one of which is set"""
_SIZES = ("num_rollouts", "mini_batch_size", "micro_batch_size")
"""each at most as large as the one before it"""


def apply_precedence(node: DictConfig, typed: set[str]) -> None:
    """Change the values of files and defaults that contradict typed ones: another length of the
    run, larger batches than they are cut from, lengths beyond the longest response, another source
    of prompts. Two typed values stay, and are refused later.

    Args:
        typed: dotted keys that were set on the command line.
    """
    for section, prompts in (("prompts", node.prompts), ("prompts.eval", node.prompts.eval)):
        for name, other in (("path", "items"), ("items", "path")):
            if f"{section}.{name}" in typed and prompts[name] is not None \
                    and f"{section}.{other}" not in typed:
                prompts[other] = None
    if "generation.max_new_tokens" in typed and node.env.fn is None:
        _limit_to_response(node, typed)
    for section, lengths in LENGTHS.items():
        updates, limited = node[section], False
        if any(f"{section}.{name}" in typed and updates[name] is not None for name in lengths):
            for name in lengths:
                if f"{section}.{name}" not in typed:
                    updates[name] = None
        for limit, name in pairwise(size for size in _SIZES if size in updates):
            limited |= f"{section}.{limit}" in typed
            if limited and f"{section}.{name}" not in typed \
                    and (updates[name] or 0) > updates[limit] > 0:
                updates[name] = updates[limit]


def _limit_to_response(node: DictConfig, typed: set[str]) -> None:
    longest, length_range = node.generation.max_new_tokens, node.generation.length_sampler
    for name in ("min_response_length", "overlong_buffer"):
        if f"reward.{name}" not in typed and (node.reward[name] or 0) > longest > 0:
            node.reward[name] = longest
    if "generation.length_sampler" not in typed and length_range and max(length_range) > longest:
        node.generation.length_sampler = None


def overruled(files: Iterable[Entry], words: Words, sources: Mapping[str, str]) -> str:
    """A sentence that lists values of a typed option of a group (``ppo=trlx``) that a recipe
    replaces; "" if there are none.

    Args:
        files: settings of files, in the order in which they are composed.
        sources: the source of each key.
    """
    chosen = {f"/{setting.key}/{setting.value}.yaml": f"{setting.key}={setting.value}"
              for setting in words.settings if setting.key in config_groups()}
    values: dict[str, tuple[str, Any]] = {}
    replaced: dict[tuple[str, str], list[str]] = {}
    for key, value, file in files:
        option = next((name for end, name in chosen.items() if f"/{file}".endswith(end)), None)
        before, old = values.pop(key, (None, None))
        if option is not None:
            values[key] = option, value
        elif before is not None and value != old and sources.get(key) != COMMAND_LINE:
            replaced.setdefault((before, file), []).append(
                f"{key}={shown(value)} (not {shown(old)})")
    sentences = [f"{file} goes over {option}: {', '.join(texts)}"
                 for (option, file), texts in replaced.items()]
    return "; ".join(sentences) + "; a key that is typed goes over both" if sentences else ""
