"""Checks of what is installed: versions, pairs that don't fit, settings that interfere."""

from __future__ import annotations

import os
from importlib import metadata

from packaging.requirements import Requirement
from packaging.version import InvalidVersion, Version

from ppocli.doctor.checking import Finding, Surroundings
from ppocli.doctor.processes import ask
from ppocli.storage.environment import home_shortened, hub_home, installed_version

SAFE_TRANSFORMERS = Version("5.5.0")
HYDRA_PLUGINS = ("hydra-optuna-sweeper", "hydra-joblib-launcher", "hydra-submitit-launcher",
                 "hydra-ray-launcher", "hydra-ax-sweeper", "hydra-nevergrad-sweeper")


def _version(name: str) -> Version | None:
    found = installed_version(name)
    try:
        return None if found is None else Version(found)
    except InvalidVersion:
        return None


def packages(around: Surroundings) -> Finding:
    """Every declared dependency is there, in a version within our bounds."""
    try:
        declared = [Requirement(text) for text in metadata.requires("ppocli") or []]
    except metadata.PackageNotFoundError:
        return Finding("warning", "ppocli isn't installed as a package: versions can't be compared",
                       "pip install ppocli, or pip install -e . in a checkout")
    wrong: list[tuple[Requirement, str]] = []
    optional: list[tuple[Requirement, str]] = []
    count = 0
    for requirement in declared:
        extra = "extra" in str(requirement.marker or "")
        if requirement.marker and not extra and not requirement.marker.evaluate():
            continue
        found = _version(requirement.name)
        count += not extra
        if found is not None and not requirement.specifier.contains(found, prereleases=True):
            (optional if extra else wrong).append((requirement, f"{requirement.name} {found}"))
        elif found is None and not extra:
            wrong.append((requirement, f"{requirement.name} is missing"))
    if wrong or optional:
        chosen = wrong or optional
        text = ", ".join(f"{what} (wanted: {requirement.specifier})"
                         for requirement, what in [*wrong, *optional])
        return Finding("fail" if wrong else "warning", text, "pip install " + " ".join(
            f"'{requirement.name}{requirement.specifier}'" for requirement, _ in chosen))
    return Finding("ok", f"{count} dependencies within their bounds")


def transformers(around: Surroundings) -> Finding:
    """Versions of transformers that run code from a model's files without being asked to."""
    found = _version("transformers")
    if found is None:
        return Finding("fail", "transformers isn't installed", "pip install 'transformers>=5.5.0'")
    if found < SAFE_TRANSFORMERS:
        return Finding("fail", f"{found} can be made to run code by a model's files, also with "
                       "trust_remote_code=false (CVE-2026-4372, CVE-2026-5241)",
                       "pip install 'transformers>=5.5.0,<6'")
    return Finding("ok", str(found))


def hydra(around: Surroundings) -> Finding:
    """Hydra, OmegaConf and Hydra's plugins: pairs that are known not to work together."""
    core, omegaconf = _version("hydra-core"), _version("omegaconf")
    if core is None or omegaconf is None:
        return Finding("fail", "hydra-core or omegaconf isn't installed",
                       "pip install 'hydra-core>=1.3.8,<1.5'")
    plugins = {name: found for name in HYDRA_PLUGINS if (found := _version(name)) is not None}
    text = ", ".join([f"hydra-core {core}", f"omegaconf {omegaconf}",
                      *(f"{name} {found}" for name, found in plugins.items())])
    if core < Version("1.4.0rc0") and omegaconf >= Version("2.4"):
        return Finding("warning", f"{text}: this Hydra was made for omegaconf below 2.4",
                       "pip install 'omegaconf>=2.3,<2.4'")
    sweeper = plugins.get("hydra-optuna-sweeper")
    newer = "pip install 'hydra-optuna-sweeper>=1.4.0rc3,<1.5'"
    if sweeper is not None and sweeper < Version("1.3"):
        return Finding("warning", f"{text}: this sweeper is years older than the others; pip goes "
                       "back to it when another package asks for a newer optuna", newer)
    if sweeper is not None and sweeper < Version("1.4.0rc0"):
        return Finding("warning", f"{text}: this sweeper pins optuna below 3, whose storage in a "
                       "database fails with today's SQLAlchemy; sweeps in memory work",
                       f"leave hydra.sweeper.storage unset, or {newer}")
    if sweeper is not None and core < Version("1.4.0rc0"):
        return Finding("warning", f"{text}: this sweeper wants hydra-core 1.4",
                       "pip install 'hydra-core>=1.4.0rc3,<1.5'")
    return Finding("ok", text + (" (a pre-release)" if core.is_prerelease else ""))


def deepspeed(around: Surroundings) -> Finding:
    """Whether DeepSpeed can be imported: transformers does so when it saves a model."""
    found = installed_version("deepspeed")
    if found is None:
        return Finding("warning", "not installed", "pip install 'deepspeed>=0.17,<1'")
    answer = ask("import_probe", "deepspeed", seconds=60)
    if answer.facts is None:
        return Finding("fail", f"{found} can't be imported: {answer.error}",
                       "pip install --force-reinstall deepspeed, after torch")
    return Finding("ok", found)


def accelerate(around: Surroundings) -> Finding:
    """Settings of accelerate that a run would take over without a word: a default configuration
    file (``accelerate launch`` reads it), and variables (every process does)."""
    file = hub_home() / "accelerate/default_config.yaml"
    set_here = sorted(name for name in os.environ if name.startswith("ACCELERATE_"))
    ranks = os.environ.get("WORLD_SIZE", "1")
    if set_here:
        return Finding("warning", f"{', '.join(set_here)} change what accelerate does",
                       "unset them, unless a launcher set them for this process")
    if ranks != "1":
        return Finding("warning", f"WORLD_SIZE is set to {ranks[:20]!a}: this shell looks like a "
                       "rank of a launcher", "unset WORLD_SIZE RANK LOCAL_RANK")
    if file.is_file():
        return Finding("warning", f"`accelerate launch` takes settings from "
                       f"{home_shortened(str(file))}",
                       "give it --config_file, or move that file away")
    return Finding("ok", "no default configuration file, no variables")
