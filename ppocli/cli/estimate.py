"""``ppocli estimate``: the memory and disk space of a run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ppocli.cli.options import AsJson, Overrides, flag, option
from ppocli.cli.output import print_json, print_table
from ppocli.config.text import format_bytes, format_memory, three_digits
from ppocli.distributed.standard_output import put
from ppocli.errors import ConfigError, InputError, OutOfMemoryError

if TYPE_CHECKING:
    from ppocli.config.schema import TrainConfig
    from ppocli.distributed.host_memory import Room
    from ppocli.models.memory import Estimate

ASSUMED_TOKENS = 512
"""of the longest prompt, if nothing else is known"""
PLACES = {"device": "", "offloaded": ", in host memory while it isn't used",
          "host": ", in host memory", "elsewhere": ", on a separate device"}
NOT_NEEDED = frozenset({"reward.fn", "data.path", "ppo.total_episodes, ppo.num_steps"})
"""keys that a run needs and an estimate does not"""


def print_estimate(
        overrides: Overrides = None,
        prompt_tokens: int | None = option("N", "Tokens of the longest prompt (default: "
            "prompts.max_length, else 512).", min=1),
        available: bool = flag("Compare with the free memory of this machine.", "--available"),
        memory: float | None = option("GIB", "Compare with a device of this many GiB.", min=0.001,
                                    max=1e6),
        as_json: AsJson = False) -> None:
    """Estimate the memory and disk space of a run without loading anything.

    Takes the settings of ppocli train; reward, prompts and length may be left out. Of the model,
    only config.json is read, so it can be larger than this machine. Rewards aren't counted. Exit
    code 8: the run doesn't fit what it was compared with.

    \b
    Examples:
      ppocli estimate +recipe=quickstart
      ppocli estimate +recipe=quickstart --available
      ppocli estimate model.path=./llama hardware=zero2 hardware.num_processes=8 \\
          hardware.device=cuda hardware.precision=bf16 --prompt-tokens 512 --memory 80
      ppocli estimate model.path=./llama model.peft.type=lora hardware=gpu_bf16 --memory 24
      ppocli estimate +recipe=quickstart --json
    """
    if available and memory is not None:
        raise ConfigError("--available and --memory can't be combined.", fix="give one of them")
    cfg = composed(overrides or [])
    from ppocli.distributed.host_memory import on_cuda
    from ppocli.models.memory import estimate, models_of, read_config
    from ppocli.models.memory_check import advice, compared
    from ppocli.runs.model_files import quiet_transformers

    quiet_transformers()
    config = read_config(cfg.model, "model.path")
    tokens, new, source = _longest(cfg, config, prompt_tokens)
    hardware, cuda = cfg.hardware, on_cuda(cfg.hardware)
    ranks = hardware.num_processes * hardware.num_nodes
    room = _room(memory, cuda) if available or memory is not None else None
    needed = estimate(cfg, models_of(cfg, config), prompt_tokens=tokens, new_tokens=new, cuda=cuda,
                      ranks=ranks, ranks_on_host=hardware.num_processes,
                      device_bytes=None if room is None else room.whole_device)
    sizes = None if room is None else compared(needed, room)
    if sizes == []:
        raise InputError("This system doesn't tell how much memory is free.", where="--available",
                         fix="give it: --memory GIB")
    helps, title = advice(cfg), {
        "model": cfg.model.path, "device": "cuda" if cuda else "cpu", "ranks": ranks,
        "prompt_tokens": tokens, "prompt_tokens_from": source, "new_tokens": new}
    fits = all(size <= free for size, _, free, _ in sizes or ())
    if as_json:
        sizes_of = ("rollout", "update", "host", "loading", "checkpoint", "model", "disk")
        print_json(title | {f"{name}_bytes": getattr(needed, name) for name in sizes_of} | {
            "parts": [part._asdict() for part in needed.parts],
            "lines": [line._asdict() for line in needed.lines], "rows": needed.rows._asdict(),
            "advice": helps, "fits": None if sizes is None else fits})
    else:
        _print(needed, cfg, title)
    if not sizes:
        return
    size, _, free, place = max(sizes, key=lambda sizes: sizes[0] / max(sizes[2], 1))
    verdict = (f"{format_memory(size)} of {format_memory(free)} of {place} "
               f"({size / max(free, 1):.0%})")
    if fits and not as_json:
        put(f"fits: {verdict}")
    elif as_json and not fits:
        raise SystemExit(OutOfMemoryError.exit_code)
    elif not fits:
        raise OutOfMemoryError(f"It doesn't fit: {verdict}.", fix=", ".join(helps) or None)


def composed(words: Sequence[str]) -> TrainConfig:
    """The configuration of a run that may lack what it is trained on and for how long."""
    from ppocli.config import compose, problems
    from ppocli.config.command_words import read_words
    from ppocli.launch.target_config import JUDGED, allow_code

    composition = compose.compose(read_words(words))
    problems.raise_problems([p for p in composition.problems()
                             if p.key not in NOT_NEEDED], composition.hint)
    allow_code(composition, JUDGED)
    return composition.config


def _longest(cfg: TrainConfig, config: Any, typed: int | None) -> tuple[int, int, str]:
    """Tokens of the longest prompt, or of an example before what is trained on; those after it;
    and where the first is from."""
    from ppocli.config import tasks
    from ppocli.config.tasks import longest_response, longest_rollout
    from ppocli.models.loading.model_config import ModelFacts, max_positions
    from ppocli.models.trunk import has_encoder

    lm, task = ModelFacts(config), tasks.task_name(cfg)
    positions, on_data = max_positions(lm) or 2**31, task in tasks.DATA_TASKS
    longest = cfg.data.max_length if on_data else (
        cfg.prompts.max_length or max(cfg.prompts.length_sampler or [0]))
    source = "as given" if typed else f"{'data' if on_data else 'prompts'}.max_length" if longest \
        else "assumed; set it with --prompt-tokens N"
    tokens = min(typed or longest or ASSUMED_TOKENS, positions)
    if task == "reward_model":
        return tokens, 1, source
    if on_data:
        return tokens if has_encoder(lm) else 1, tokens, source
    if typed is None and not has_encoder(lm):  # an encoder-decoder has that many on either side
        tokens = max(min(tokens, positions - longest_response(cfg)), 1)
    return tokens, longest_rollout(cfg), source


def _room(memory: float | None, cuda: bool) -> Room:
    """The memory to compare with: so many GiB, or what is free here."""
    from ppocli.distributed.host_memory import ASSUMED_DEVICE, Room, room_here

    if memory is not None:
        size = round(memory * 2**30)
        return (Room(size, None, ASSUMED_DEVICE, size) if cuda
                else Room(None, size, ASSUMED_DEVICE))
    import torch

    if cuda and not torch.cuda.is_available():
        raise ConfigError("No CUDA device was found to compare with.", where="--available",
                          fix="give its memory: --memory 80, or set hardware.device=cpu")
    return room_here(cuda=cuda)


# Printing -----------------------------------------------------------------------------------------

def _print(needed: Estimate, cfg: TrainConfig, title: Mapping[str, Any]) -> None:
    rows, device = needed.rows, max(needed.rollout, needed.update)
    put(", ".join([f"{cfg.model.path} on {title['device']} {cfg.hardware.precision}",
                   "1 process" if title["ranks"] == 1 else f"{title['ranks']} processes",
                   *[f"ZeRO {cfg.hardware.zero_stage}"] * (cfg.hardware.zero_stage > 0)]))
    for part in needed.parts:
        put(f"{part.name}: {part.parameters:,} parameters, {part.trained:,} of them trained"
            if part.trained else f"{part.name}: {part.parameters:,} parameters, frozen"
            + PLACES[part.place])
    put(f"longest: {title['prompt_tokens']} tokens of prompt ({title['prompt_tokens_from']}), "
        f"{title['new_tokens']} after it")
    put(f"per process at once: {rows.decoded} samples in generation, {rows.update} in a forward "
        "and backward pass\n")
    unit, size = ("GiB", 2**30) if device >= 2**30 else ("MiB", 2**20)
    table = [(f"{unit} per process", "rollout", "update", "host"), *(
        (name, *(three_digits(count / size) if count else "-" for count in sizes))
        for name, *sizes in (*needed.lines, ("most at once", needed.rollout, needed.update, 0)))]
    print_table(table, right=frozenset({1, 2, 3}))
    if needed.update < sum(line.update for line in needed.lines):
        put("(activations are released while gradients are created: never all of both at once)")
    put(f"\nhost: {format_memory(needed.host) if needed.host else 'nothing'}, "
        f"{format_memory(needed.loading)} while models are "
        "loaded; Python and its libraries not included")
    put(f"disk: {format_bytes(needed.checkpoint)} per checkpoint, {format_bytes(needed.model)} for "
        f"the model, {format_bytes(needed.disk)} at most")
