"""``ppocli estimate``, ``env`` and ``doctor``: what a run needs, what this machine has."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ppocli.cli.options import AsJson, Overrides, flag, option
from ppocli.cli.output import complain, print_json, print_table, say
from ppocli.display.results import put
from ppocli.errors import ConfigError, InputError, OutOfMemoryError
from ppocli.text import format_bytes, format_memory, three_digits

if TYPE_CHECKING:
    from ppocli.config.schema import TrainConfig
    from ppocli.estimate.check import Estimate
    from ppocli.parallel.host_memory import Room

ASSUMED_TOKENS = 512
"""of the longest prompt, if nothing else is known"""
PLACES = {"device": "", "offloaded": ", in host memory while it isn't used",
          "host": ", in host memory", "elsewhere": ", on a separate device"}
PHASES = {"generate": "generation", "score": "scoring", "update": "updates", "save": "saving"}
"""what an estimate calls the phases of a step: how it is told"""
NOT_NEEDED = frozenset({"reward.fn", "data.path", "ppo.total_episodes, ppo.num_steps"})
"""keys that a run needs and an estimate does not"""


def print_estimate(
        overrides: Overrides = None,
        prompt_tokens: int | None = option("N", "Tokens of the longest prompt (default: of the "
            "prompts themselves, if they and the tokenizer are on this machine).", min=1),
        available: bool = flag("Compare with the free memory of this machine.", "--available"),
        memory: float | None = option("GIB", "Compare with a device of this many GiB.", min=0.001,
                                    max=1e6),
        as_json: AsJson = False) -> None:
    """Estimate the memory and disk space of a run without loading anything.

    Takes the settings of ppocli train; reward, prompts and length may be left out. Of the model,
    only config.json is read, so it can be larger than this machine. What can't be estimated is
    listed as unknown, with the reason. Exit code 8: the run doesn't fit what it was compared with.

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
    from ppocli.config import tasks
    from ppocli.estimate.check import advice, estimate, needs
    from ppocli.estimate.parts import models_of, read_config
    from ppocli.storage.model_files import quiet_transformers

    quiet_transformers()
    config = read_config(cfg.model.path, key="model.path", revision=cfg.model.revision,
                         trust_remote_code=cfg.model.trust_remote_code)
    tokens_of = _example_tokens if tasks.task_name(cfg) in tasks.DATA_TASKS else _prompt_tokens
    tokens, new, source = tokens_of(cfg, config, prompt_tokens)
    hardware = cfg.hardware
    cuda = hardware.device == "cuda"
    if hardware.device == "auto":  # as on this machine
        import torch

        cuda = torch.cuda.is_available()
    found = estimate(cfg, models_of(cfg, config), prompt_tokens=tokens, new_tokens=new, cuda=cuda,
                     ranks=hardware.num_processes * hardware.num_nodes,
                     ranks_on_host=hardware.num_processes)
    compared = needs(found, _room(memory, cuda)) if available or memory is not None else None
    if compared == []:
        raise InputError("This system doesn't tell how much memory is free.", where="--available",
                         fix="give it: --memory GIB")
    helps = advice(found, cfg)
    if as_json:
        print_json(_as_json(found, cfg, source, helps, compared))
    else:
        _print(found, cfg, source)
    if compared is None:
        return
    needed, there, place = max(compared, key=lambda one: one[0] / max(one[1], 1))
    verdict = (f"{format_memory(needed)} of {format_memory(there)} of {place} "
               f"({needed / max(there, 1):.0%})")
    if needed <= there:
        if not as_json:
            put(f"fits: {verdict}")
    elif as_json:
        raise SystemExit(OutOfMemoryError.exit_code)
    else:
        raise OutOfMemoryError(f"It doesn't fit: {verdict}.", fix=f"those that save most first: "
                               f"{', '.join(helps)}" if helps else None)


def composed(words: Sequence[str]) -> TrainConfig:
    """The configuration of a run that may lack what it is trained on and for how long."""
    from ppocli.config import compose, problems
    from ppocli.config.words import read_words
    from ppocli.launching.target_config import JUDGED, allow_code

    read = read_words(words)
    if read.only_prints or read.is_sweep:
        raise ConfigError("These words don't describe a single run.", where="command line",
                          fix="leave out -m, --cfg, --info and --hydra-help")
    found = compose.compose(read)
    problems.raise_problems([p for p in found.problems() if p.key not in NOT_NEEDED], found.hint)
    allow_code(found, JUDGED)
    return found.config


def _prompt_tokens(cfg: TrainConfig, config: Any, given: int | None) -> tuple[int, None, str]:
    """Tokens of the longest prompt; what the configuration says of responses; and how the first is
    known."""
    from ppocli.config.sampling import longest_response
    from ppocli.models.loading.model_config import max_positions, model_facts
    from ppocli.models.trunk import has_encoder

    if given is not None:
        return given, None, "as given"
    lm = model_facts(cfg.model, config)
    limit = max_positions(lm)
    # an encoder-decoder has that many on either side
    new = 0 if has_encoder(lm) else longest_response(cfg)
    room = 2**31 if limit is None else max(limit - new, 1)
    if (measured := _longest_prompt(cfg, room, whole=has_encoder(lm))) is not None:
        return measured, None, "the longest there is"
    if longest := cfg.prompts.max_length or max(cfg.prompts.length_sampler or [0]):
        return min(longest, room), None, "prompts.max_length or length_sampler"
    return min(ASSUMED_TOKENS, room), None, "assumed; set it with --prompt-tokens N"


def _example_tokens(cfg: TrainConfig, config: Any, given: int | None) -> tuple[int, int, str]:
    """Tokens of an example of the fullest pass, those before what is trained on apart, and how that
    is known."""
    from ppocli.config import tasks
    from ppocli.data.sources import names_hub_dataset
    from ppocli.models.loading.model_config import max_positions, model_facts
    from ppocli.models.loading.tokenizer import load_tokenizer
    from ppocli.tasks.supervised import pass_tokens, read_rows

    lm, scores = model_facts(cfg.model, config), tasks.task_name(cfg) == "reward_model"
    path, hardware = cfg.data.path, cfg.hardware
    if given is None and path is not None and not names_hub_dataset(path):
        train, _ = read_rows(cfg, load_tokenizer(cfg.model), lm)
        return *pass_tokens(cfg, train, hardware.num_processes * hardware.num_nodes), (
            "the longest there are")
    room = max_positions(lm) or 2**31
    source = "as given" if given else "data.max_length" if cfg.data.max_length else (
        "assumed; set it with --prompt-tokens N")
    tokens = min(given or cfg.data.max_length or ASSUMED_TOKENS, room)
    return (tokens, 1, source) if scores else (
        tokens if lm.config.is_encoder_decoder else 1, tokens, source)


def _longest_prompt(cfg: TrainConfig, room: int, *, whole: bool) -> int | None:
    """Of the prompts of a run, if they and the tokenizer are on this machine."""
    from ppocli.data.prompt_set import load_eval_prompts, load_prompts
    from ppocli.data.sources import names_hub_dataset
    from ppocli.models.loading.chat_template import decided
    from ppocli.models.loading.tokenizer import load_tokenizer

    prompts = decided(cfg, cfg.model.path, cfg.model.revision).prompts
    if (prompts.path is None and prompts.items is None) or any(
            path is not None and names_hub_dataset(path)
            for path in (prompts.path, prompts.eval.path)):
        return None
    try:
        tokenizer = load_tokenizer(cfg.model)
    except InputError:  # a folder with config.json alone
        return None
    training = load_prompts(prompts, tokenizer, seed=cfg.seed, max_prompt_tokens=room, whole=whole)
    judged = load_eval_prompts(prompts, tokenizer, seed=cfg.seed, max_prompt_tokens=room,
                               training=training, whole=whole)
    return max(len(ids) for found in (training, judged) for ids in found.token_ids)


def _room(memory: float | None, cuda: bool) -> Room:
    """The memory to compare with: so many GiB, or what is free here."""
    from ppocli.parallel.host_memory import ASSUMED_DEVICE, Room, room_here

    if memory is not None:
        size = round(memory * 2**30)
        return Room(size, None, ASSUMED_DEVICE) if cuda else Room(None, size, ASSUMED_DEVICE)
    import torch

    if cuda and not torch.cuda.is_available():
        raise ConfigError("No CUDA device was found to compare with.", where="--available",
                          fix="give its memory: --memory 80, or set hardware.device=cpu")
    return room_here(cuda=cuda)


# Telling ------------------------------------------------------------------------------------------

def _print(found: Estimate, cfg: TrainConfig, source: str) -> None:
    from ppocli.estimate.check import roughly

    put(*_heading(found, cfg, source), "", sep="\n")
    sums = found.sums
    unit, size = ("GiB", 2**30) if sums.device >= 2**30 else ("MiB", 2**20)

    def cell(amount: int, there: bool = True) -> str:
        return three_digits(amount / size) if amount and there else "-"

    columns = [each for each in PHASES.items() if each[0] != "save" or cfg.hardware.zero_stage]
    rows: list[tuple[str, ...]] = [
        (f"{unit} per process", *(heading for _, heading in columns), "host")]
    rows += [(line.name, *(cell(line.device, phase in line.phases) for phase, _ in columns),
              cell(line.host)) for line in found.lines]
    rows.append(("most at once", *(cell(getattr(sums, phase)) for phase, _ in columns), "-"))
    print_table(rows, right=frozenset(range(1, len(columns) + 2)))
    if sums.update < sum(line.device for line in found.lines if "update" in line.phases):
        put("(activations go while gradients come: not all of both is there at once)")
    put()
    many = found.layout.ranks_on_host
    of = "" if many == 1 else f" for its {many} processes"
    put(f"host: {format_memory(sums.host) if sums.host else 'nothing'}{of}, "
          f"{format_memory(sums.loading)} while models are loaded; Python and its libraries apart")
    disk = found.disk
    put(f"disk: {format_bytes(disk.checkpoint)} per checkpoint, {format_bytes(disk.model)} for "
          f"the model, {format_bytes(disk.run)} at most")
    for name, why in found.unknown.items():
        put(f"{name}: unknown, {why}")
    if found.rough:
        put(roughly(found))


def _heading(found: Estimate, cfg: TrainConfig, source: str) -> Iterator[str]:
    from ppocli.config import tasks

    hardware, layout = cfg.hardware, found.layout
    many = "1 process" if layout.ranks == 1 else f"{layout.ranks} processes"
    nodes = "" if hardware.num_nodes == 1 else f" on {hardware.num_nodes} machines"
    how = f", ZeRO {hardware.zero_stage}" if hardware.zero_stage else (
        ", DDP" if layout.ranks > 1 else "")
    yield (f"{cfg.model.path} on {'cuda' if layout.cuda else 'cpu'} {hardware.precision}, "
           f"{many}{nodes}{how}")
    for part in found.parts:
        frozen = part.parameters - part.trained
        each = (part.size - part.gradients) / frozen if frozen else 4
        stored = f", the others stored with {each:.3g} bytes each" if each != 4 else ""
        trained = f"{part.trained:,} trained{stored}" if part.sharded else (
            f"frozen, stored with {each:.3g} bytes each{PLACES[part.place]}")
        yield f"{part.name}: {part.parameters:,} parameters, {trained}"
    if tasks.task_name(cfg) in tasks.DATA_TASKS:
        yield (f"tokens: {found.prompt_tokens + found.new_tokens - 1} of a row ({source}), "
               f"{found.new_tokens} of them counted by the loss")
        yield f"per rank at once: {layout.rows} rows in a forward and backward pass"
        return
    yield (f"tokens: prompts of {found.prompt_tokens} ({source}), responses of {found.new_tokens}")
    yield (f"per rank at once: {layout.decoded} samples in generation, {layout.rows} in a forward "
           "and backward pass")


def _as_json(found: Estimate, cfg: TrainConfig, source: str, helps: list[str],
             compared: list[tuple[int, int, str]] | None) -> dict[str, Any]:
    layout, sums, disk = found.layout, found.sums, found.disk
    answer: dict[str, Any] = {
        "model": cfg.model.path, "device": "cuda" if layout.cuda else "cpu",
        "precision": cfg.hardware.precision, "zero_stage": cfg.hardware.zero_stage,
        "ranks": layout.ranks, "ranks_on_host": layout.ranks_on_host,
        "prompt_tokens": found.prompt_tokens, "prompt_tokens_from": source,
        "new_tokens": found.new_tokens, "samples_generated": layout.decoded,
        "samples_a_pass": layout.rows,
        "parts": [{"kind": p.kind, "name": p.name, "parameters": p.parameters,
                   "trained": p.trained, "bytes": p.size} for p in found.parts],
        "unknown": [{"name": name, "why": why} for name, why in found.unknown.items()],
        "not_measured": list(found.rough),
        "lines": [{"name": line.name, "device_bytes": line.device, "host_bytes": line.host,
                   **{f"in_{word}": phase in line.phases for phase, word in PHASES.items()}}
                  for line in found.lines],
        "generation_bytes": sums.generate, "scoring_bytes": sums.score,
        "update_bytes": sums.update, "saving_bytes": sums.save, "device_bytes": sums.device,
        "host_bytes": sums.host, "loading_bytes": sums.loading,
        "checkpoint_bytes": disk.checkpoint, "model_bytes": disk.model, "disk_bytes": disk.run,
        "advice": helps}
    if compared is not None:
        answer["fits"] = all(needed <= there for needed, there, _ in compared)
        answer["compared"] = [{"needed_bytes": needed, "available_bytes": there, "of": place}
                              for needed, there, place in compared]
    return answer


# This machine -------------------------------------------------------------------------------------

def env(as_json: AsJson = False) -> None:
    """Print versions, hardware and variables, for pasting into an issue.

    Tokens are never shown, only whether they are set.

    \b
    Examples:
      ppocli env
      ppocli env --json
    """
    from ppocli.storage.environment import PRODUCTS, THREADS, describe

    facts = describe(places=True)
    if "error" not in facts["torch"]:  # what hardware.gemm=auto and num_threads=auto come to here
        from ppocli.config.schema import HardwareConfig
        from ppocli.parallel.onednn import choose_gemm
        from ppocli.parallel.threads import default_threads

        facts |= {PRODUCTS: choose_gemm(HardwareConfig()), THREADS: default_threads()}
    if as_json:
        print_json(facts)
    else:
        put("\n".join(_env_lines(facts)))


def doctor(folder: Annotated[Path, typer.Argument(
               metavar="[DIR]", help="The folder that contains, or will contain, the run folders.")
               ] = Path("runs"),
           as_json: AsJson = False) -> None:
    """Check this machine and the installation; each check says how to fix what it finds.

    Exit code 0: nothing failed (warnings don't count), 1: a check failed.

    \b
    Examples:
      ppocli doctor
      ppocli doctor /scratch/runs
      ppocli doctor --json
    """
    from ppocli.doctor import CHECKS
    from ppocli.doctor_probes import Surroundings, run_checks

    width = max(len(check.__name__) for check in CHECKS)
    erasable = sys.stderr.isatty() and os.environ.get("TERM") != "dumb"

    def begin(name: str) -> None:
        """Show what is checked; nothing for an empty name."""
        if erasable:
            print("\r\x1b[K" + (name and f"checking {name} ..."), end="", file=sys.stderr,
                  flush=True)

    tell: Callable[[str], None] = say if as_json else partial(print, flush=True)
    results: list[dict[str, Any]] = []
    for name, found, seconds in run_checks(CHECKS, Surroundings(folder), begin=begin):
        begin("")
        results.append({"name": name, **asdict(found), "seconds": seconds})
        tell(f"{found.verdict:<8} {name:<{width}}  {found.text}")
        if found.fix is not None and found.verdict != "ok":
            tell(f"{'':<8} {'':<{width}}  fix: {found.fix}")
    if as_json:
        print_json(results)
    if failed := [result["name"] for result in results if result["verdict"] == "fail"]:
        complain(f"{len(failed)} of {len(results)} checks failed: {', '.join(failed)}")
        raise SystemExit(1)


def _env_lines(facts: Mapping[Any, Any], section: str = "") -> Iterator[str]:
    for name, value in facts.items():
        inner = dict(enumerate(value or ())) if name == "gpus" else value
        if isinstance(inner, dict) and inner:
            yield from _env_lines(inner, f"{section}{name}.")
        else:
            shown = ", ".join(map(str, value)) if isinstance(value, list) else value
            yield f"- {section}{name}: {shown or 'none'}"
