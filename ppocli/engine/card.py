"""The README.md of a trained model folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ppocli.config.schema import TrainConfig
from ppocli.engine.console import figure
from ppocli.version import __version__


def write_card(folder: Path, cfg: TrainConfig, summary: dict[str, Any]) -> None:
    """Write a model card: metadata for the Hub, what was trained, figures before and after."""
    before, after = summary["eval_before"] or {}, summary["eval_after"] or {}
    base = cfg.model.path
    header = ["---", "library_name: transformers", "pipeline_tag: text-generation",
              "tags: [ppo, rlhf, ppocli]"]
    if not base.startswith((".", "/", "~", "builtin:")):
        header += [f"base_model: {base}", "base_model_relation: finetune"]
    rewards = ", ".join(cfg.reward.fns) if cfg.reward.fns else cfg.reward.fn
    names = [n for n in ("reward_mean", "kl_mean", "response_tokens_mean") if n in after]
    names += [n for n in after if n.startswith("metrics/")]
    rows = [f"| {name} | {figure(before.get(name), 3)} | {figure(after[name], 3)} |"
            for name in names]
    body = [
        "---", "", f"# {cfg.run_name or 'A policy trained with PPO'}", "",
        f"`{base}`, fine-tuned with PPO by ppocli {__version__}: "
        f"{summary['steps']} steps, {summary['episodes']} episodes, {summary['updates']} updates.",
        "", f"Reward: `{rewards}`. KL coefficient at the end: {summary['kl_coef']:.4g}.", "",
        "| evaluation | before | after |", "|---|---|---|", *rows, "",
    ]
    (folder / "README.md").write_text("\n".join(header + body), encoding="utf-8")
