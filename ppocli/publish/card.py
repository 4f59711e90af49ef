"""Model cards: of an export, for the Hub and for people, and of the ``model/`` of a run; and what
is known about an exported policy, read from its run's folder, without secrets."""

import json
import logging
import os
import re
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from ppocli.builtin.names import BUILTIN_PREFIX
from ppocli.config import config_yaml, schema, secrets, tasks
from ppocli.config.text import clean, figure
from ppocli.runs import atomic, hub, model_files
from ppocli.runs.listing import data_name, last_part, source_names
from ppocli.runs.record import RunRecord, eval_samples, first_of_each_prompt, read_run
from ppocli.runs.run_folder import RunFolder
from ppocli.runs.target import Target
from ppocli.version import __version__

log = logging.getLogger("ppocli")

CARD = "README.md"
AUTO_CLASSES = {"CAUSAL_LM": "ForCausalLM", "SEQ_2_SEQ_LM": "ForSeq2SeqLM",
                "SEQ_CLS": "ForSequenceClassification", "TOKEN_CLS": "ForTokenClassification"}
"""PEFT's types of tasks and the ends of names of transformers' classes for them"""
_PIPELINES = {"CAUSAL_LM": "text-generation", "SEQ_2_SEQ_LM": "text2text-generation",
              "SEQ_CLS": "text-classification", "TOKEN_CLS": "token-classification"}
"""PEFT's types of tasks and the Hub's names for them"""
_FIRST_FIGURES = ("reward_mean", "kl_mean", "accuracy", "loss", "perplexity", "margin_mean", "ece",
                  "response_tokens_mean")
_TAGS = {"sft": ["sft"], "reward_model": ["reward-model", "rlhf"]}
_LONGEST_TEXT = 300
_NUM_SAMPLES = 4


@dataclass(frozen=True, slots=True)
class Provenance:
    """What a card says about a policy; all but ``name`` is empty for a model of no run."""

    name: str
    step: int | None = None
    run: RunRecord | None = None
    license: dict[str, str] = field(default_factory=dict)
    """of the starting model: ``license``, ``license_name``, ``license_link``; empty if unknown"""
    before: dict[str, float] = field(default_factory=dict)
    """figures of the evaluation before training"""
    after: dict[str, float] = field(default_factory=dict)
    """figures of the evaluation of the exported weights"""
    samples: list[tuple[dict[str, Any], dict[str, Any]]] = field(default_factory=list)
    """rows of samples.jsonl: responses to the same prompt before training and after"""

    @property
    def config(self) -> schema.TrainConfig | None:
        """How the policy was trained."""
        return None if self.run is None else self.run.config


def provenance_of(target: Target) -> Provenance:
    """Read a target's run. The Hub is asked for the license of a starting model from there."""
    if target.run_dir is None:
        return Provenance(target.label)
    run, step = read_run(target.run_dir), target.step or 0
    before, after = (
        {name.removeprefix("eval/"): float(value) for row in run.rows if row["step"] == number
         for name, value in row.items() if name.startswith("eval/") and value is not None}
        for number in (0, step))
    old, new = map(first_of_each_prompt, eval_samples(run.folder, 0, step))
    samples = [(old[prompt], new[prompt]) for prompt in old
               if step > 0 and "response" in new.get(prompt, ())]  # reward models write none
    return Provenance(
        run.name, target.step, run, license_of(run.config.model.path, run.config.model.revision),
        before, after, samples[:_NUM_SAMPLES])


def license_of(model: str, revision: str | None) -> dict[str, str]:
    """The license in the README.md of ``model.path``; empty where it names none or isn't there."""
    if model.startswith(BUILTIN_PREFIX):  # under the same license as ppocli
        return {"license": "apache-2.0"}
    from huggingface_hub import hf_hub_download
    from huggingface_hub.repocard import metadata_load

    with suppress(Exception):  # a missing or broken card is no reason not to export
        path = Path(model).expanduser() / "README.md" if hub_name(model) is None else \
            hf_hub_download(model, "README.md", revision=revision,
                            local_files_only=not hub.hub_reachable())
        card = metadata_load(path) or {}
        return {key: card[key] for key in ("license", "license_name", "license_link")
                if isinstance(card.get(key), str)}
    return {}


def hub_name(path: str | None) -> str | None:
    """``path`` of a run's configuration if it is a Hub name; None for folders, which are absolute
    there, lists, addresses, built-ins and Python objects."""
    if path == config_yaml.PYTHON_OBJECT or "://" in (path or "") or (
            path or "/").startswith((".", "/", "~", "{", BUILTIN_PREFIX)):
        return None
    return path


def masked(text: str) -> str:
    """``text`` with secrets of the environment, the token of ``hf auth login``, texts shaped like
    tokens and passwords in URLs replaced by ``***``, and the home folder by ``~``."""
    from huggingface_hub import get_token

    text = secrets.hide_secrets(text, filter(None, [get_token()]))
    home = os.path.expanduser("~")
    for folder in {home, os.path.realpath(home)} - {"~", "/", os.path.realpath("~")}:
        text = re.sub(re.escape(folder) + r"(?![\w.-])", "~", text)
    return text


def task_of(folder: Path) -> str:
    """What the model or the adapter in ``folder`` is for, as PEFT calls it: ``CAUSAL_LM``."""
    config = atomic.read_json(folder / "config.json") or {}
    return model_files.task_type(folder, SimpleNamespace(**{"architectures": [], **config}))


def render_card(folder: Path, facts: Provenance, *, location: str, dtype: str | None = None) -> str:
    """The text of README.md of an export or a run's ``model/``, without secrets.

    Args:
        folder: the model or the adapter, with all its other files.
        location: what a reader passes to ``from_pretrained``.
        dtype: type of the weights, where the card tells it.
    """
    from huggingface_hub import ModelCard

    config = facts.config
    command = (facts.run.command if facts.run else None) or ""
    example = facts.samples[0][0]["prompt"] if facts.samples else "Once upon a time"
    card = ModelCard.from_template(
        _metadata(folder, facts),
        template_path=str(Path(__file__).with_name("model_card.md.j2")), version=__version__,
        # Markdown, not HTML: what comes from outside passes ``escaped`` or ``code`` in the template
        escaped=escaped, code=_code, figure=figure, figure_rows=figure_rows,
        facts=facts, run=facts.run, config=config, adapter=model_files.is_adapter(folder),
        scorer=task_of(folder) == "SEQ_CLS", dtype=dtype,
        settings=(folder / "training_config.yaml").is_file(),
        chat=(folder / "chat_template.jinja").is_file(), auto=AUTO_CLASSES[task_of(folder)],
        location=json.dumps(location), command=command.replace("```", ""),
        example=json.dumps(clean(example)[:_LONGEST_TEXT], ensure_ascii=False),
        **({} if config is None else _training(config))).content
    return masked(re.sub(r"\n{3,}", "\n\n", card).rstrip() + "\n")


def write_card(folder: Path, cfg: schema.TrainConfig, summary: dict[str, Any]) -> None:
    """Write the card of a finished run's ``model/``; ``folder`` lies in the run's folder."""
    run = RunRecord(RunFolder(folder.parent), cfg, [], summary, "finished")
    facts = Provenance(cfg.run_name or "A policy trained with PPO", summary["steps"], run,
                       before=summary["eval_before"] or {}, after=summary["eval_after"] or {})
    atomic.write_atomic(folder / CARD, render_card(folder, facts, location=model_files.MODEL))


def _training(config: schema.TrainConfig) -> dict[str, Any]:
    """What a model was trained from and on, in words."""
    kind = tasks.task_name(config)
    data = data_name(config)
    judged = last_part(config.prompts.eval.path or f"prompts of {data}")
    if kind in tasks.DATA_TASKS:
        share = tasks.val_share(config.data)
        judged = last_part(str(config.data.val)) if share is None else \
            f"the {share:.3g} of the data that was held back"
    return {"base": last_part(config.model.path), "base_hub_name": hub_name(config.model.path),
            "kind": kind, "data": data, "eval_prompts": judged, "reward": source_names(config)}


def _metadata(folder: Path, facts: Provenance) -> Any:
    """A card's metadata as ``ModelCardData``."""
    from huggingface_hub import EvalResult, ModelCardData

    config, adapter = facts.config, model_files.is_adapter(folder)
    kind, pipeline = tasks.task_name(config) if config else "ppo", _PIPELINES[task_of(folder)]
    data: dict[str, Any] = facts.license | {
        "library_name": "peft" if adapter else "transformers", "pipeline_tag": pipeline,
        "tags": [*_TAGS.get(kind, ["ppo", "rlhf"]), "ppocli"]}
    if config is not None:
        source = hub_name((config.data if kind in tasks.DATA_TASKS else config.prompts).path)
        data |= {} if source is None else {"datasets": [source]}
        if (base := hub_name(config.model.path)) is not None:
            data |= {"base_model": base,
                     "base_model_relation": "adapter" if adapter else "finetune"}
        if facts.after:
            data |= {"model_name": facts.name, "eval_results": [
                EvalResult(task_type=pipeline, dataset_type=source or "prompts", metric_type=name,
                           dataset_name=_training(config)["eval_prompts"], metric_name=name,
                           metric_value=facts.after[name])
                for name, _, _ in figure_rows(facts.before, facts.after)]}
    return ModelCardData(**data)


def with_location(card: str, location: str) -> str:
    """``card`` with another name to load the model by."""
    return re.sub(r'^name = ".*"$', lambda match: f"name = {json.dumps(location)}", card, count=1,
                  flags=re.MULTILINE)


def escaped(text: str) -> str:
    """Text of a model or a user as inline Markdown that shows exactly that: no markup, no HTML, no
    links, no line breaks, no control characters; cut at 300 characters."""
    text = clean(text)
    text = text if len(text) <= _LONGEST_TEXT else text[:_LONGEST_TEXT - 1] + "…"
    text = text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    text = re.sub(r"[\\`*_\[\]{}()#!|~$@^]", r"\\\g<0>", text)
    # what Markdown makes a link of without being asked
    return re.sub(r"(?i)\b(www|https?|ftp|mailto|xmpp)([.:])", r"\1\\\2", text).strip()


def _code(name: str) -> str:
    """The name of a figure or a key."""
    return f"`{name}`" if re.fullmatch(r"[\w/.-]+", name) else escaped(name)


def figure_rows(before: dict[str, Any], after: dict[str, Any]) -> list[tuple[str, str, str]]:
    """(name, before, after) of an evaluation's main figures, those of the rewards and metrics."""
    names = [name for name in _FIRST_FIGURES if name in after]
    names += [name for name in after if name.startswith(("reward/", "metrics/"))]
    return [(name, figure(before.get(name), 3), figure(after[name], 3))
            for name in names or after]  # all figures of a task from outside
