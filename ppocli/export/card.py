"""Model cards: of an export, for the Hub and for people, and of the ``model/`` of a run."""

import json
import re
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from ppocli.config import resolved, schema, tasks
from ppocli.export.facts import Facts, Mask, hub_name, is_encoder_decoder, split_card
from ppocli.runs import pictures, record
from ppocli.runs.listing import last_part
from ppocli.storage.atomic import read_json, write_atomic
from ppocli.storage.model_files import is_adapter, is_scorer
from ppocli.text import clean, figure
from ppocli.version import __version__

CARD = "README.md"
CURVE = "curve.svg"
PLACEHOLDER = "*Write about this model here: what is between the two comments is kept.*"
USER_BEGIN, USER_END = "<!-- user text: begin -->", "<!-- user text: end -->"
"""what a user writes between these lines of a card is kept when the card is written again"""
_FIRST_FIGURES = ("reward_mean", "kl_mean", "accuracy", "loss", "perplexity", "margin_mean", "ece",
                  "response_tokens_mean")
_HOW = {"ppo": "fine-tuned with PPO (proximal policy optimization)",
        "sft": "fine-tuned on examples (supervised fine-tuning)",
        "reward_model": "trained as a reward model on pairs of responses"}
_LOSSES = {"sft": "mean negative log-probability of the tokens that are trained on (%s)",
           "reward_model": "-log sigmoid(chosen - rejected - margin) + %s * (chosen + rejected)^2"}
_TAGS = {"sft": ["sft"], "reward_model": ["reward-model", "rlhf"]}
_LONGEST_TEXT = 300
_SPECIAL = re.compile(r"[\\`*_\[\]{}()#!|~$@^]")
_LINK = re.compile(r"\b(www|https?|ftp|mailto|xmpp)([.:])", re.IGNORECASE)
"""what Markdown makes a link of without being asked"""
_STORED = re.compile(r"^(.*The weights are stored as )[\w+?]+\.$", re.MULTILINE)
_LOCATION = re.compile(r'^name = ".*"$', re.MULTILINE)


def render_card(facts: Facts, source: Path, previous: str | None, mask: Mask, *, dtype: str,
                location: str, value_head: list[str], curve: bool) -> str:
    """The text of an export's README.md.

    Args:
        source: the folder of what is exported, a model's or an adapter's own, which PEFT loads.
        previous: the card that is replaced, if any: the user's text in it, and metadata that this
            one hasn't, stay.
        dtype: how the weights are stored.
        location: what a reader passes to ``from_pretrained``.
        value_head: names of the value function's files.
        curve: whether there is a ``curve.svg``.
    """
    config = facts.config
    command = facts.command or ""
    example = facts.samples[0][0]["prompt"] if facts.samples else "Once upon a time"
    adapter, scorer = is_adapter(source), is_scorer(source)
    card = _rendered(
        "model_card.md.j2", metadata(facts, source, split_card(previous or "")[0]),
        # Markdown, not HTML: everything in the template that comes from outside passes these two
        escaped=escaped, code=_code, figure=figure, figure_rows=figure_rows,
        user_begin=USER_BEGIN, user_end=USER_END,
        user_text=user_text(previous or "") or PLACEHOLDER, version=__version__,
        facts=facts, run=facts.run, config=config, adapter=adapter, chat=_chats(source),
        curve=curve, scorer=scorer, dtype=dtype, location=json.dumps(location),
        auto=("AutoPeftModel" if adapter else "AutoModel") + (
            "ForSequenceClassification" if scorer else
            "ForSeq2SeqLM" if is_encoder_decoder(source) else "ForCausalLM"),
        value_head=value_head,
        example=json.dumps(clean(example)[:_LONGEST_TEXT], ensure_ascii=False),
        command=None if resolved.PYTHON_OBJECT in command else command.replace("```", ""),
        local_files=any(part.startswith(("/", "'/")) or "=/" in part or ":/" in part
                        for part in command.split()),
        trust=", trust_remote_code=True" if config and config.model.trust_remote_code else "",
        **({} if config is None else {
            **_training(config), "base_hub_name": hub_name(config.model.path),
            "prompts": _prompts(config), "eval_prompts": _eval_prompts(config)}))
    return re.sub(r"\n{3,}", "\n\n", mask(card)).rstrip() + "\n"


def write_card(folder: Path, cfg: schema.TrainConfig, summary: dict[str, Any]) -> None:
    """Write the card of a run's ``model/``: metadata for the Hub, what was trained, figures before
    and after."""
    from huggingface_hub import ModelCardData

    write_atomic(folder / CARD, _rendered(
        "trained_card.md.j2", ModelCardData(**_of_model(folder, cfg)),
        title=cfg.run_name or "A policy trained with PPO", version=__version__, summary=summary,
        task="PPO" if cfg.task.fn is None else f"`{cfg.task.fn}`", **_training(cfg),
        figures=figure_rows(summary["eval_before"] or {}, summary["eval_after"] or {})))


def _rendered(template: str, card_data: Any, **values: Any) -> str:
    """A card from its template. Unlike huggingface_hub's ``ModelCard.from_template`` it fails where
    the template names what nobody gives."""
    environment = Environment(loader=FileSystemLoader(Path(__file__).parent),
                              undefined=StrictUndefined)
    return environment.get_template(template).render(card_data=card_data.to_yaml(), **values)


def _training(config: schema.TrainConfig) -> dict[str, Any]:
    """What was done to the model, in words: ``how`` (of another task than ours its import path),
    and with what; ``loss`` of a training on a data set."""
    kind, loss = tasks.task_name(config), None
    if kind in _LOSSES:
        loss = _LOSSES[kind] % (f"data.train_on={config.data.train_on}" if kind == "sft" else
                                f"{config.reward_model.center_coef:g}")
    return {"base": last_part(config.model.path), "loss": loss,
            "how": _HOW.get(kind) or f"fine-tuned with `{config.task.fn}`",
            "data": _source(config.data.path) or "given inline", "reward": reward_names(config)}


def _chats(source: Path) -> bool:
    """Whether the tokenizer there has a chat template."""
    config = read_json(source / "tokenizer_config.json") or {}
    return (source / "chat_template.jinja").is_file() or bool(config.get("chat_template"))


def _source(path: str | None) -> str | None:
    """A path or a Hub name, as a card names it; None where there is none, but a Python object."""
    return None if path in (None, resolved.PYTHON_OBJECT) else last_part(str(path))


def _of_model(source: Path, config: schema.TrainConfig | None) -> dict[str, Any]:
    """Metadata that every card has."""
    adapter, kind = is_adapter(source), tasks.task_name(config) if config else "ppo"
    data: dict[str, Any] = {"library_name": "peft" if adapter else "transformers",
                            "tags": [*_TAGS.get(kind, ["ppo", "rlhf"]), "ppocli"],
                            "pipeline_tag": "text-classification" if is_scorer(source) else
                            "text2text-generation" if is_encoder_decoder(source) else
                            "text-generation"}
    if config and (base := hub_name(config.model.path)) is not None:
        data |= {"base_model": base, "base_model_relation": "adapter" if adapter else "finetune"}
    return data


def metadata(facts: Facts, source: Path, previous: dict[str, Any]) -> Any:
    """The card's front matter as ``huggingface_hub.ModelCardData``; keys that ``previous`` has
    and this training doesn't determine are kept."""
    from huggingface_hub import EvalResult, ModelCardData

    config = facts.config
    own = _of_model(source, config) | facts.license
    if config is not None:
        supervised = tasks.task_name(config) in tasks.DATA_TASKS
        trained = (config.data if supervised else config.prompts).path
        if (data_set := hub_name(trained)) is not None:
            own["datasets"] = [data_set]
        judged = hub_name(trained if supervised else config.prompts.eval.path or trained)
        metrics = {"reward_mean": f"mean reward ({reward_names(config)})",
                   "kl_mean": "KL from the starting model (nats per response)",
                   "response_tokens_mean": "mean response length (tokens)"}
        if facts.after:
            own |= {"model_name": facts.name, "eval_results": [
                EvalResult(task_type=own["pipeline_tag"], dataset_type=judged or "prompts",
                           dataset_name=_eval_prompts(config), metric_type=name,
                           metric_name=metrics.get(name, name), metric_value=facts.after[name])
                for name, _, _ in figure_rows(facts.before, facts.after)]}
    if isinstance(previous.get("tags"), list):
        own["tags"] += [tag for tag in previous["tags"] if tag not in own["tags"]]
    kept = {key: value for key, value in previous.items()
            if key not in own and key not in ("model-index", "model_name", "eval_results")}
    return ModelCardData(**own, **kept)


def render_again(card: str, location: str, dtype: str, previous: str | None, mask: Mask) -> str:
    """The card of an export that is exported once more: what the earlier one told, with where it
    lies now and how it's stored.

    Args:
        previous: the card that is replaced, if any: as for :func:`render_card`.
    """
    from huggingface_hub.utils import yaml_dump

    text = _STORED.sub(lambda match: f"{match[1]}{dtype}.", with_location(card, location))
    if (kept := user_text(previous or "")) is not None:
        text = with_user_text(text, kept)
    data, body = split_card(text)
    old = split_card(previous or "")[0]
    if added := {key: value for key, value in old.items() if key not in data}:
        text = f"---\n{yaml_dump(data | added, sort_keys=False)}---\n{body}"
    return mask(text)


def user_text(card: str) -> str | None:
    """What a user wrote on a card: between the markers, or, on a card that has none, all of it
    below the metadata. None where there is nothing but what we put there."""
    body = split_card(card)[1]
    start, end = body.find(USER_BEGIN), body.find(USER_END)
    if start >= 0 and end > start:
        body = body[start + len(USER_BEGIN):end]
    body = body.strip()
    return None if body in ("", PLACEHOLDER) else body


def with_user_text(card: str, text: str) -> str:
    """``card`` with the text between its markers replaced."""
    head, _, rest = card.partition(USER_BEGIN)
    _, _, tail = rest.partition(USER_END)
    return f"{head}{USER_BEGIN}\n{text.strip()}\n{USER_END}{tail}"


def with_location(card: str, location: str) -> str:
    """``card`` with another name to load the model by."""
    return _LOCATION.sub(lambda match: f"name = {json.dumps(location)}", card, count=1)


def escaped(text: str) -> str:
    """Text of a model or a user as inline Markdown that shows exactly that: no markup, no HTML, no
    links, no line breaks, no control characters; cut at 300 characters."""
    text = clean(text)
    if len(text) > _LONGEST_TEXT:
        text = text[:_LONGEST_TEXT - 1] + "…"
    text = text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    text = _SPECIAL.sub(lambda match: "\\" + match[0], text)
    return _LINK.sub(r"\1\\\2", text).strip()


def _code(name: str) -> str:
    """The name of a figure or a key."""
    return f"`{name}`" if re.fullmatch(r"[\w/.-]+", name) else escaped(name)


def figure_rows(before: dict[str, Any], after: dict[str, Any]) -> list[tuple[str, str, str]]:
    """(name, before, after) of an evaluation's main figures, those of the rewards and metrics."""
    names = [name for name in _FIRST_FIGURES if name in after]
    names += [name for name in after if name.startswith(("reward/", "metrics/"))]
    names = names or list(after)  # of another task than PPO
    return [(name, figure(before.get(name), 3), figure(after[name], 3)) for name in names]


def reward_names(cfg: schema.TrainConfig) -> str:
    """The rewards of a configuration, as a card names them, of a file only its name; the
    environment where it rewards alone."""
    named = [str(fn) for _, fn, _ in schema.rewards_of(cfg.reward) if fn] or [str(cfg.env.fn)]
    return ", ".join(name.rsplit("/", 1)[-1] if ".py:" in name else name for name in named)


def _prompts(config: schema.TrainConfig) -> str:
    prompts = config.prompts
    return _source(prompts.path) or ("given inline" if prompts.items or prompts.path else
                                     "the beginning-of-sequence token")


def _eval_prompts(config: schema.TrainConfig) -> str:
    if tasks.task_name(config) in tasks.DATA_TASKS:
        share = tasks.val_share(config.data)
        return (last_part(str(config.data.val)) if share is None else
                f"the {share:.3g} of the data that was held back")
    own = config.prompts.eval
    return _source(own.path) or ("prompts given inline" if own.items or own.path else
                                 f"prompts of {_prompts(config)}")


def curve(run: record.RunRecord) -> str | None:
    """``curve.svg``: the reward above, the KL (nats per response) below; lines of the rollouts,
    dots of the evaluations; of trainings on a data set loss and accuracy. None for a run without
    any figure, and without matplotlib."""
    panels = []
    for title, trained, evaluated, unit in (
            ("Loss", "loss/total", "eval/loss", "nats"), ("Accuracy", "", "eval/accuracy", "share"),
            ("Mean reward", "reward/mean", "eval/reward_mean", ""),
            ("KL from the starting model", "objective/kl", "eval/kl_mean", "nats per response")):
        lines = [pictures.Line("training", run.series(trained), kind="thin"),
                 pictures.Line("evaluation", run.series(evaluated), kind="dots")]
        if lines := [line for line in lines if line.points]:
            panels.append(pictures.Panel(title, lines, y_label=unit))
    return pictures.draw(panels).decode() if panels and pictures.installed() else None
