"""``ppocli recipes``, ``schema``, ``doctor`` and ``env``: settings of whole runs, what can be set,
and what a person with a failing installation needs to know.

Importing torch or DeepSpeed may crash or hang, so it is tried in a process of its own.
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
import textwrap
from collections.abc import Iterator, Mapping
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from ppocli.builtin.names import recipe_files
from ppocli.cli.options import AsJson, Command, flag, group
from ppocli.cli.output import complain, print_json, print_table, say
from ppocli.config.text import did_you_mean, format_bytes, pasted
from ppocli.distributed.standard_output import put
from ppocli.errors import ConfigError, PpocliError
from ppocli.runs import atomic
from ppocli.runs.hub import hub_reachable, offline_variable

if TYPE_CHECKING:
    from ppocli.config.keys import Key


recipes_app = group("List, show and copy recipes.")
Name = Annotated[str, typer.Argument(autocompletion=lambda: list(recipe_files()))]


@recipes_app.command("list", cls=Command)
def print_recipes(as_json: AsJson = False) -> None:
    """List the recipes: those in ./recipes of the current folder, then the included ones."""
    recipes = [{"name": name, "purpose": _purpose(file), "file": str(file)}
               for name, file in recipe_files().items()]
    if as_json:
        print_json(recipes)
    else:
        print_table([("name", "purpose"), *((each["name"], each["purpose"]) for each in recipes)])


def _purpose(file: Path) -> str:
    """The first comment of a recipe."""
    lines = _text(file).splitlines() if file.is_file() else ()
    return next((line.lstrip("# ").strip() for line in lines
                 if line.startswith("#") and not line.startswith("# @")), "")


def _text(file: Path) -> str:
    return file.read_text(encoding="utf-8", errors="replace")


@recipes_app.command("show", cls=Command)
def print_recipe(name: Name) -> None:
    """Print a recipe as YAML."""
    put(_text(recipe_file(name)), end="")


@recipes_app.command("copy", cls=Command)
def copy_recipe(name: Name,
                destination: Annotated[Path | None, typer.Argument(
                    metavar="[DEST]", help="File or folder (default: ./recipes).")] = None,
                overwrite: bool = flag("Replace an existing file.", "--overwrite")) -> None:
    """Copy a recipe in order to change it."""
    source = recipe_file(name)
    target = destination if destination is not None else Path("recipes")
    if target.suffix != ".yaml":
        target = target / f"{name}.yaml"
    if target.exists() and (not overwrite or target.samefile(source)):
        raise ConfigError(f"{target} exists already.", where=str(target), fix="give another name, "
                          f"e.g. {target.with_name('mine.yaml')}, or replace it with --overwrite")
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_bytes(source.read_bytes())
    put(target)
    folder = target.parent.resolve()
    option = "" if folder == Path.cwd() / "recipes" else f"--config-dir {pasted(target.parent)} "
    say(f"Change it, then run: ppocli train {option}{pasted('+recipe=' + target.stem)}")


def recipe_file(name: str) -> Path:
    """The file of a recipe.

    Raises:
        ConfigError: there is none of that name.
    """
    files = recipe_files()
    if name not in files:
        raise ConfigError(f"unknown recipe {name}{did_you_mean(name, list(files))}",
                          fix="choose one of: " + ", ".join(files))
    return files[name]


# The schema ---------------------------------------------------------------------------------------

def complete_key(incomplete: str) -> list[str]:
    """Keys and sections of the configuration."""
    from ppocli.config.keys import schema_keys, schema_sections

    return [*schema_sections(), *schema_keys()]


def print_schema(
        name: Annotated[str | None, typer.Argument(
            metavar="[KEY]", autocompletion=complete_key,
            help="A key or a section: ppo.vf_coef, ppo (default: all).")] = None,
        as_json: AsJson = False) -> None:
    """Print every setting with its type, default, allowed values and meaning.

    \b
    Examples:
      ppocli schema ppo
      ppocli schema generation.top_p
      ppocli schema --json
    """
    from ppocli.config.keys import schema_keys, schema_sections

    keys = [key for key in schema_keys().values()
            if name is None or key.name == name or key.name.startswith(name + ".")]
    if not keys:
        raise ConfigError(f"{name}: there is no such key or section"
                          + did_you_mean(str(name), [*schema_keys(), *schema_sections()]),
                          where="command line", fix="ppocli schema lists all keys")
    if as_json:
        print_json([_facts(key) for key in keys])
    else:
        put("\n".join(map(_shown, keys)))


def _facts(key: Key) -> dict[str, Any]:
    from omegaconf import MISSING

    bounds = {name: key.metadata[name] for name in ("ge", "gt", "le", "lt")
              if key.metadata[name] is not None}
    return {"key": key.name, "type": key.expected, "required": key.default == MISSING,
            "default": None if key.default == MISSING else key.default,
            "choices": key.metadata["choices"] and list(key.metadata["choices"]), **bounds,
            "meaning": key.doc}


def _shown(key: Key) -> str:
    from omegaconf import MISSING

    default = "must be given" if key.default == MISSING else (
        f"default {json.dumps(key.default, ensure_ascii=False)}")
    values = key.allowed if key.metadata["choices"] else ", ".join(
        text for text in (key.expected, key.allowed) if text)
    if key.metadata["choices"] and key.optional:
        values += " or null"
    doc = textwrap.fill(key.doc, 96, initial_indent="    ", subsequent_indent="    ",
                        break_long_words=False, break_on_hyphens=False)
    return f"{key.name}  ({values}; {default})\n{doc}"


# The machine --------------------------------------------------------------------------------------

SECONDS = 80
"""that an import may take"""
DISK_FAIL, DISK_LOW = 200 * 10**6, 5 * 10**9
"""bytes; a checkpoint takes three times the weights"""
TORCH = """
import json, torch
devices = ["cpu", *(f"cuda:{i}" for i in range(torch.cuda.device_count()))]
for device in devices:
    ones = torch.ones(64, 64, device=device)
    assert bool(((ones @ ones) == 64).all()), f"a matrix product on {device} is wrong"
names = [torch.cuda.get_device_name(device) for device in devices[1:]]
build = f"CUDA {torch.version.cuda}" if torch.version.cuda else (
    f"ROCm {torch.version.hip}" if torch.version.hip else "CPU only")
print(json.dumps({"version": torch.__version__, "build": build, "gpus": names}))
"""
DEEPSPEED = 'import deepspeed; print(); print("{}")'


class Check(NamedTuple):
    """What a check came to: ``ok``, ``warning`` or ``fail``, and what to do about it."""

    verdict: str
    text: str
    fix: str | None = None


def ask(code: str) -> dict[str, Any]:
    """The JSON object in the last line that a process of its own prints, or why there is none, as
    ``error``."""
    try:
        done = subprocess.run([sys.executable, "-P", "-c", code], text=True, errors="replace",
                              check=False, stdin=subprocess.DEVNULL, capture_output=True,
                              timeout=SECONDS)
    except subprocess.TimeoutExpired:
        return {"error": f"no answer within {SECONDS} s"}
    with suppress(ValueError, IndexError):
        answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
        return answer
    lines = done.stderr.strip().splitlines()
    return {"error": lines[-1] if lines else f"exit code {done.returncode}"}


def packages(_folder: Path) -> Check:
    """Every declared dependency is within the bounds of this ppocli."""
    from packaging.requirements import Requirement

    from ppocli.runs import environment

    try:
        declared = [Requirement(text) for text in metadata.requires("ppocli") or []]
    except metadata.PackageNotFoundError:
        return Check("warning", "ppocli isn't installed as a package: versions can't be compared",
                     "pip install ppocli, or pip install -e . in a checkout")
    installed = {each: environment.installed_version(each.name) for each in declared
                 if each.marker is None}
    if wrong := [each for each, version in installed.items()
                 if version is None or not each.specifier.contains(version, prereleases=True)]:
        return Check("fail", ", ".join(
            f"{each.name} {installed[each] or 'is missing'} (needs {each.specifier})"
            for each in wrong), "pip install " + " ".join(f"'{each}'" for each in wrong))
    return Check("ok", f"Python {platform.python_version()}, {len(installed)} dependencies "
                 "within their bounds")


def torch(_folder: Path) -> Check:
    """torch can be imported, sees the GPUs that there are, and computes on each device."""
    from ppocli.runs import environment

    facts, driver = ask(TORCH), environment.nvidia_driver()
    install = "install another build of torch: https://pytorch.org/get-started/locally"
    if "error" in facts:
        return Check("fail", f"torch can't be imported, or computes wrongly: {facts['error']}",
                     f"look at nvidia-smi, set CUDA_VISIBLE_DEVICES, or {install}")
    text = ", ".join([f"{facts['version']} ({facts['build']})", *facts["gpus"]])
    if driver is not None and not facts["gpus"]:
        return Check("warning", f"{text}: NVIDIA driver {driver}, but torch sees no GPU",
                     f"unset CUDA_VISIBLE_DEVICES, update the driver, or {install}")
    return Check("ok", text)


def deepspeed(_folder: Path) -> Check:
    """DeepSpeed can be imported; transformers does so when it saves a model."""
    from ppocli.runs import environment

    version, answer = environment.installed_version("deepspeed"), ask(DEEPSPEED)
    return Check("ok", str(version)) if "error" not in answer else Check(
        "fail", f"{version} can't be imported: {answer['error']}",
        "pip install --force-reinstall deepspeed, after torch")


def hub(_folder: Path) -> Check:
    """The Hub answers within two seconds, or downloads are forbidden."""
    from ppocli.config.secrets import safe_text

    if (name := offline_variable()) is not None:
        return Check("ok", f"{name}={os.environ[name]}: nothing is downloaded")
    address = safe_text(os.environ.get("HF_ENDPOINT") or "https://huggingface.co")
    return Check("ok", f"{address} can be reached") if hub_reachable() else Check(
        "warning", f"{address} doesn't answer within 2 s: only models and data on this machine can "
        "be used", "HF_HUB_OFFLINE=1, HF_ENDPOINT for a mirror, or HTTPS_PROXY for a proxy")


def output(folder: Path) -> Check:
    """Runs can be written, and locked, where they go."""
    from ppocli.runs import run_folder

    new = [part for part in (folder, *folder.absolute().parents) if not part.exists()]
    try:
        run_folder.probe_writable(folder)
        with TemporaryDirectory(dir=folder) as probe, run_folder.lock(Path(probe)):
            return Check("ok", f"{folder}: written and locked")
    except (PpocliError, OSError) as error:
        return Check("fail", getattr(error, "what", str(error)), "output_dir=ANOTHER-FOLDER")
    finally:
        for part in new:
            with suppress(OSError):
                part.rmdir()


def disk(folder: Path) -> Check:
    """Free space where runs and downloads go."""
    from ppocli.runs import environment

    cache = Path(os.environ.get("HF_HUB_CACHE") or environment.hub_home() / "hub").expanduser()
    free = {name: atomic.free_bytes(path) or 0 for name, path in (
        ("runs", folder), ("Hub cache", cache))}
    text = ", ".join(f"{name} {format_bytes(count)}" for name, count in free.items()) + " free"
    least = min(free.values())
    return Check("ok" if least >= DISK_LOW else "warning" if least >= DISK_FAIL else "fail", text,
                 None if least >= DISK_LOW else "free some space, or set output_dir, HF_HOME")


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
    results = {}
    for check in (packages, torch, deepspeed, hub, output, disk):
        result = results[check.__name__] = check(folder)
        for text in [f"{result.verdict:<8} {check.__name__:<10} {result.text}",
                     *([f"{'':<19} fix: {result.fix}"] if result.fix else [])]:
            (say if as_json else put)(text)
    if as_json:
        print_json([{"name": name, **result._asdict()} for name, result in results.items()])
    if failed := [name for name, result in results.items() if result.verdict == "fail"]:
        complain(f"{len(failed)} of {len(results)} checks failed: {', '.join(failed)}")
        raise SystemExit(1)


def env(as_json: AsJson = False) -> None:
    """Print versions, hardware and variables, for pasting into an issue.

    Tokens are never shown, only whether they are set.

    \b
    Examples:
      ppocli env
      ppocli env --json
    """
    from ppocli.runs import environment

    facts = environment.describe()
    if "error" not in facts["torch"]:  # what hardware.gemm=auto and num_threads=null come to here
        from ppocli.config.schema import HardwareConfig
        from ppocli.distributed.onednn import choose_gemm
        from ppocli.distributed.torch_settings import default_threads

        facts |= {environment.PRODUCTS: choose_gemm(HardwareConfig()),
                  environment.THREADS: default_threads()}
    if as_json:
        print_json(facts)
    else:
        put("\n".join(_env_lines(facts)))


def _env_lines(facts: Mapping[Any, Any], section: str = "") -> Iterator[str]:
    for name, value in facts.items():
        inner = dict(enumerate(value or ())) if name == "gpus" else value
        if isinstance(inner, dict) and inner:
            yield from _env_lines(inner, f"{section}{name}.")
        else:
            shown = ", ".join(map(str, value)) if isinstance(value, list) else value
            yield f"- {section}{name}: {shown or 'none'}"
