"""Model cards: of an export, for the Hub and for people, and of the ``model/`` of a run."""

import json
import logging
import re
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from ppocli.config import config_yaml, schema, tasks
from ppocli.config.text import clean, figure
from ppocli.publish import pictures
from ppocli.publish.provenance import Provenance, hub_name, masked
from ppocli.runs import atomic, model_files, record
from ppocli.runs.listing import last_part, source_names
from ppocli.runs.run_folder import RunFolder
from ppocli.version import __version__

log = logging.getLogger("ppocli")

CARD, CURVE = "README.md", "curve.svg"
PLACEHOLDER = "*Write about this model here: what is between the two comments is kept.*"
USER_BEGIN, USER_END = "<!-- user text: begin -->", "<!-- user text: end -->"
"""what a user writes between these lines of a card is kept when the card is written again"""
AUTO_CLASSES = {"CAUSAL_LM": "ForCausalLM", "SEQ_2_SEQ_LM": "ForSeq2SeqLM",
                "SEQ_CLS": "ForSequenceClassification", "TOKEN_CLS": "ForTokenClassification"}
"""PEFT's types of tasks and the ends of names of transformers' classes for them"""
_PIPELINES = {"CAUSAL_LM": "text-generation", "SEQ_2_SEQ_LM": "text2text-generation",
              "SEQ_CLS": "text-classification", "TOKEN_CLS": "token-classification"}
"""PEFT's types of tasks and the Hub's names for them"""
_FIRST_FIGURES = ("reward_mean", "kl_mean", "accuracy", "loss", "perplexity", "margin_mean", "ece",
                  "response_tokens_mean")
_TAGS = {"sft": ["sft"], "reward_model": ["reward-model", "rlhf"]}
_CURVES = (("Loss", "loss/total", "eval/loss", "nats"), ("Accuracy", "", "eval/accuracy", "share"),
           ("Mean reward", "reward/mean", "eval/reward_mean", ""),
           ("KL from the starting model", "objective/kl", "eval/kl_mean", "nats per response"))
_LONGEST_TEXT = 300


def task_of(folder: Path) -> str:
    """What the model or the adapter in ``folder`` is for, as PEFT calls it: ``CAUSAL_LM``.

    Raises:
        InputError: an adapter for something else than ``AUTO_CLASSES``.
    """
    config = atomic.read_json(folder / "config.json") or {}
    return model_files.task_type(folder, SimpleNamespace(**{"architectures": [], **config}))


def render_card(folder: Path, facts: Provenance, previous: str = "", *, location: str,
                dtype: str | None = None) -> str:
    """The text of README.md of an export or a run's ``model/``, without secrets.

    Args:
        folder: the model or the adapter, with all its other files.
        previous: the card that is replaced, if any: its user's text and metadata are kept.
        location: what a reader passes to ``from_pretrained``.
        dtype: type of the weights, where the card tells it.
    """
    from huggingface_hub import ModelCard

    config = facts.config
    command = (facts.run.command if facts.run else None) or ""
    example = facts.samples[0][0]["prompt"] if facts.samples else "Once upon a time"
    card = ModelCard.from_template(
        _metadata(folder, facts, previous),
        template_path=str(Path(__file__).with_name("model_card.md.j2")), version=__version__,
        # Markdown, not HTML: what comes from outside passes ``escaped`` or ``code`` in the template
        escaped=escaped, code=_code, figure=figure, figure_rows=figure_rows,
        user_text=f"{USER_BEGIN}\n{user_text(previous) or PLACEHOLDER}\n{USER_END}",
        facts=facts, run=facts.run, config=config, adapter=model_files.is_adapter(folder),
        scorer=task_of(folder) == "SEQ_CLS", curve=(folder / CURVE).is_file(), dtype=dtype,
        settings=(folder / "training_config.yaml").is_file(),
        chat=(folder / "chat_template.jinja").is_file(), auto=AUTO_CLASSES[task_of(folder)],
        location=json.dumps(location), command=command.replace("```", ""),
        example=json.dumps(clean(example)[:_LONGEST_TEXT], ensure_ascii=False),
        **({} if config is None else _training(config))).content
    return masked(re.sub(r"\n{3,}", "\n\n", card).rstrip() + "\n")


def write_card(folder: Path, cfg: schema.TrainConfig, summary: dict[str, Any]) -> None:
    """Write the card of a finished run's ``model/``; ``folder`` lies in the run's folder."""
    run = record.RunRecord(RunFolder(folder.parent), cfg, [], summary, "finished")
    facts = Provenance(cfg.run_name or "A policy trained with PPO", summary["steps"], run,
                       before=summary["eval_before"] or {}, after=summary["eval_after"] or {})
    atomic.write_atomic(folder / CARD, render_card(folder, facts, location=model_files.MODEL))


def _training(config: schema.TrainConfig) -> dict[str, Any]:
    """What a model was trained from and on, in words."""
    kind = tasks.task_name(config)
    source = config.data if kind in tasks.DATA_TASKS else config.prompts
    data = "given inline" if source.path in (None, config_yaml.PYTHON_OBJECT) else \
        last_part(str(source.path))
    judged = last_part(config.prompts.eval.path or f"prompts of {data}")
    if kind in tasks.DATA_TASKS:
        share = tasks.val_share(config.data)
        judged = last_part(str(config.data.val)) if share is None else \
            f"the {share:.3g} of the data that was held back"
    return {"base": last_part(config.model.path), "base_hub_name": hub_name(config.model.path),
            "kind": kind, "data": data, "eval_prompts": judged, "reward": source_names(config)}


def _metadata(folder: Path, facts: Provenance, previous: str) -> Any:
    """A card's metadata as ``ModelCardData``; keys of the ``previous`` card that this training
    doesn't determine are kept."""
    import yaml
    from huggingface_hub import EvalResult, ModelCardData
    from huggingface_hub.repocard import REGEX_YAML_BLOCK

    kept: dict[str, Any] = {}
    with suppress(yaml.YAMLError, TypeError, ValueError):  # broken metadata count as none
        kept = dict(yaml.safe_load(REGEX_YAML_BLOCK.search(previous)[2]))  # type: ignore[index]
    config, adapter = facts.config, model_files.is_adapter(folder)
    kind, pipeline = tasks.task_name(config) if config else "ppo", _PIPELINES[task_of(folder)]
    tags = [*_TAGS.get(kind, ["ppo", "rlhf"]), "ppocli"]
    data: dict[str, Any] = facts.license | {
        "library_name": "peft" if adapter else "transformers", "pipeline_tag": pipeline,
        "tags": list(dict.fromkeys([*tags, *(kept.get("tags") or [])]))}
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
    return ModelCardData(**{name: value for name, value in kept.items() if name != "model-index"}
                         | data)


def user_text(card: str) -> str | None:
    """What a user wrote on a card: between the markers, or, on a card that has none, all of it
    below the metadata. None where there is nothing but what we put there."""
    from huggingface_hub.repocard import REGEX_YAML_BLOCK

    body = REGEX_YAML_BLOCK.sub("", card.removeprefix("\ufeff"), count=1)
    if USER_BEGIN in body and USER_END in body:
        body = body.partition(USER_BEGIN)[2].partition(USER_END)[0]
    return None if body.strip() in ("", PLACEHOLDER) else body.strip()


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


def curve(run: record.RunRecord) -> str | None:
    """``curve.svg``: figures of the training over its steps, dots of the evaluations; None for a
    run without any figure, and without matplotlib."""
    panels = [pictures.Panel(title, [pictures.Line("training", run.series(trained),
                                                   evaluated=run.series(evaluated))], y_label=unit)
              for title, trained, evaluated, unit in _CURVES
              if run.series(trained) or run.series(evaluated)]
    if not panels:
        return None
    if not pictures.installed():
        log.info("%s is left out, since matplotlib is missing: pip install 'ppocli[plot]'", CURVE)
        return None
    return pictures.draw(panels).decode()
