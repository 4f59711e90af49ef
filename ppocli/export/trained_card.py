"""The README.md of a trained model folder, and what every model card says alike."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import yaml

from ppocli.config.schema import TrainConfig
from ppocli.display.figures import figure
from ppocli.storage.adapter_files import CONFIG, is_adapter
from ppocli.storage.model_files import BUILTIN_PREFIX
from ppocli.version import __version__

TAGS = ("ppo", "rlhf", "ppocli")
LIBRARY = "transformers"
PEFT_LIBRARY = "peft"
USER_BEGIN, USER_END = "<!-- user text: begin -->", "<!-- user text: end -->"
"""what a user writes between these lines of a card is kept when the card is written again"""
_FIRST_FIGURES = ("reward_mean", "kl_mean", "response_tokens_mean")


def is_encoder_decoder(folder: Path) -> bool:
    """Whether the model in ``folder``, or the base of the adapter there, has an encoder beside its
    decoder."""
    if is_adapter(folder):
        config = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
        return bool(config.get("task_type") == "SEQ_2_SEQ_LM")
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    return bool(config.get("is_encoder_decoder"))


def pipeline(pair: bool) -> str:
    """The Hub's name for what a model does."""
    return "text2text-generation" if pair else "text-generation"


def hub_name(model: str) -> str | None:
    """The Hub name that ``model.path`` is, or None for folders and built-ins."""
    if model.startswith((".", "/", "~", BUILTIN_PREFIX)) or Path(model).exists():
        return None
    return model


def shown_model(model: str) -> str:
    """What a published text calls a model: its name; of a folder on this machine only the last
    part."""
    is_name = model.startswith(BUILTIN_PREFIX) or hub_name(model) is not None
    return model if is_name else Path(model).name or "model"


def reward_names(cfg: TrainConfig) -> str:
    """The rewards of a configuration, as a card names them; of a file only its name."""
    named = ([str((entry or {}).get("fn")) for entry in cfg.reward.fns.values()]
             if cfg.reward.fns else [str(cfg.reward.fn)])
    return ", ".join(name.rsplit("/", 1)[-1] if ".py:" in name else name for name in named)


def figure_rows(before: dict[str, Any], after: dict[str, Any]) -> list[tuple[str, str, str]]:
    """(name, before, after) of an evaluation's main figures, those of the rewards and metrics."""
    names = [name for name in _FIRST_FIGURES if name in after]
    names += [name for name in after if name.startswith(("reward/", "metrics/"))]
    return [(name, figure(before.get(name), 3), figure(after[name], 3)) for name in names]


def write_card(folder: Path, cfg: TrainConfig, summary: dict[str, Any]) -> None:
    """Write a model card: metadata for the Hub, what was trained, figures before and after."""
    adapter = is_adapter(folder)
    data: dict[str, Any] = {"library_name": PEFT_LIBRARY if adapter else LIBRARY,
                            "tags": list(TAGS),
                            "pipeline_tag": pipeline(is_encoder_decoder(folder))}
    base = hub_name(cfg.model.path)
    if base is not None:
        data |= {"base_model": base,
                 "base_model_relation": "adapter" if adapter else "finetune"}
    rows = [f"| {name} | {old} | {new} |" for name, old, new in figure_rows(
        summary["eval_before"] or {}, summary["eval_after"] or {})]
    body = [
        "---", yaml.safe_dump(data, sort_keys=False, allow_unicode=True).rstrip(), "---", "",
        f"# {cfg.run_name or 'A policy trained with PPO'}", "",
        f"`{shown_model(cfg.model.path)}`, fine-tuned with PPO by ppocli {__version__}: "
        f"{summary['steps']} steps, {summary['episodes']} episodes, {summary['updates']} updates.",
        "", f"Reward: `{reward_names(cfg)}`. "
        f"KL coefficient at the end: {summary['kl_coef']:.4g}.", "",
        "| evaluation | before | after |", "|---|---|---|", *rows, "",
        "`ppocli export` makes a folder with a full card, ready to be shared.", "",
    ]
    (folder / "README.md").write_text("\n".join(body), encoding="utf-8")
