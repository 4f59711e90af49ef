"""Model cards: of an export, for the Hub and for people, and of the ``model/`` of a run."""

import json
import re
from pathlib import Path
from typing import Any

from ppocli.config import resolved, schema, tasks
from ppocli.export.facts import Facts, Mask, hub_name, is_encoder_decoder, split_card
from ppocli.runs import pictures, record
from ppocli.runs.listing import last_part
from ppocli.storage.model_files import is_adapter, is_scorer
from ppocli.text import clean, figure
from ppocli.version import __version__

CARD = "README.md"
CURVE = "curve.svg"
PLACEHOLDER = "*Write about this model here: what is between the two comments is kept.*"
USER_BEGIN, USER_END = "<!-- user text: begin -->", "<!-- user text: end -->"
"""what a user writes between these lines of a card is kept when the card is written again"""
_FOLDER = Path(__file__).parent
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


def render_card(facts: Facts, previous: str | None, mask: Mask, *, dtype: str, location: str,
                chat: bool, pair: bool, value_head: list[str], curve: bool, adapter: bool = False,
                scorer: bool = False) -> str:
    """The text of an export's README.md.

    Args:
        previous: the card that is replaced, if any: the user's text in it, and metadata that this
            one hasn't, stay.
        dtype: how the weights are stored.
        location: what a reader passes to ``from_pretrained``.
        chat: the tokenizer has a chat template.
        pair: the model is an encoder-decoder.
        value_head: names of the value function's files.
        curve: whether there is a ``curve.svg``.
        adapter: it is an adapter's own folder, which PEFT loads.
        scorer: it is a reward model.
    """
    from huggingface_hub import ModelCard

    config, run = facts.config, facts.run
    command = facts.command or ""
    example = facts.samples[0][0]["prompt"] if facts.samples else "Once upon a time"
    base = config.model.path if config else ""
    card = ModelCard.from_template(
        metadata(facts, split_card(previous or "")[0], pair, adapter, scorer),
        template_path=str(_FOLDER / "model_card.md.j2"),
        # Markdown, not HTML: everything in the template that comes from outside passes these two
        escaped=escaped, code=_code, figure=figure, figure_rows=figure_rows,
        user_begin=USER_BEGIN, user_end=USER_END,
        user_text=user_text(previous or "") or PLACEHOLDER, version=__version__,
        facts=facts, run=run, config=config, base=last_part(base), base_hub_name=hub_name(base),
        adapter=adapter, chat=chat, curve=curve,
        auto=("AutoPeftModel" if adapter else "AutoModel")
        + ("ForSequenceClassification" if scorer else "ForSeq2SeqLM" if pair else "ForCausalLM"),
        scorer=scorer, how=_how(config), loss=_loss(config), data=_data(config),
        dtype=dtype, location=json.dumps(location), value_head=value_head,
        example=json.dumps(clean(example)[:_LONGEST_TEXT], ensure_ascii=False),
        reward=reward_names(config) if config else "", prompts=_prompts(config) if config else "",
        eval_prompts=_eval_prompts(config) if config else "",
        command=None if resolved.PYTHON_OBJECT in command else command.replace("```", ""),
        local_files=any(part.startswith(("/", "'/")) or "=/" in part or ":/" in part
                        for part in command.split()),
        trust=", trust_remote_code=True" if config and config.model.trust_remote_code else "")
    return re.sub(r"\n{3,}", "\n\n", mask(str(card))).rstrip() + "\n"


def write_card(folder: Path, cfg: schema.TrainConfig, summary: dict[str, Any]) -> None:
    """Write the card of a run's ``model/``: metadata for the Hub, what was trained, figures before
    and after."""
    from huggingface_hub import ModelCard, ModelCardData

    data = _of_model(is_encoder_decoder(folder), is_adapter(folder), hub_name(cfg.model.path),
                     is_scorer(folder), tasks.task_name(cfg))
    ModelCard.from_template(
        ModelCardData(**data), template_path=str(_FOLDER / "trained_card.md.j2"),
        title=cfg.run_name or "A policy trained with PPO", version=__version__, summary=summary,
        base=last_part(cfg.model.path), reward=reward_names(cfg),
        task="PPO" if cfg.task.fn is None else f"`{cfg.task.fn}`",
        how=_how(cfg), loss=_loss(cfg), data=_data(cfg),
        figures=figure_rows(summary["eval_before"] or {}, summary["eval_after"] or {}),
    ).save(folder / CARD)


def _how(config: schema.TrainConfig | None) -> str:
    """What was done to the model, in words; of another task than ours its import path."""
    kind = "ppo" if config is None else tasks.task_name(config)
    return _HOW.get(kind) or f"fine-tuned with `{config and config.task.fn}`"


def _loss(config: schema.TrainConfig | None) -> str | None:
    """The loss of a training on a data set."""
    kind = "" if config is None else tasks.task_name(config)
    if config is None or kind not in _LOSSES:
        return None
    return _LOSSES[kind] % (f"data.train_on={config.data.train_on}" if kind == "sft" else
                            f"{config.reward_model.center_coef:g}")


def _source(path: str | None) -> str | None:
    """A path or a Hub name, as a card names it; None where there is none, but a Python object."""
    return None if path in (None, resolved.PYTHON_OBJECT) else last_part(str(path))


def _data(config: schema.TrainConfig | None) -> str:
    """The data of a training on a data set."""
    return _source(config.data.path if config else None) or "given inline"


def _of_model(pair: bool, adapter: bool, base: str | None, scorer: bool, kind: str
              ) -> dict[str, Any]:
    """Metadata that every card has."""
    data: dict[str, Any] = {"library_name": "peft" if adapter else "transformers",
                            "tags": [*_TAGS.get(kind, ["ppo", "rlhf"]), "ppocli"],
                            "pipeline_tag": "text-classification" if scorer else
                            "text2text-generation" if pair else "text-generation"}
    if base is not None:
        data |= {"base_model": base, "base_model_relation": "adapter" if adapter else "finetune"}
    return data


def metadata(facts: Facts, previous: dict[str, Any], pair: bool, adapter: bool = False,
             scorer: bool = False) -> Any:
    """The card's front matter as ``huggingface_hub.ModelCardData``; keys that ``previous`` has
    and this training doesn't determine are kept."""
    from huggingface_hub import EvalResult, ModelCardData

    config = facts.config
    kind = "ppo" if config is None else tasks.task_name(config)
    own = _of_model(pair, adapter, hub_name(config.model.path) if config else None, scorer, kind)
    own |= facts.license
    source = None if config is None else config.data if kind in tasks.DATA_TASKS else config.prompts
    if source is not None and (data_set := hub_name(source.path)) is not None:
        own["datasets"] = [data_set]
    if config is not None and facts.after:
        data_set = hub_name(config.data.path if kind in tasks.DATA_TASKS else
                            config.prompts.eval.path or config.prompts.path)
        metrics = {"reward_mean": f"mean reward ({reward_names(config)})",
                   "kl_mean": "KL from the starting model (nats per response)",
                   "response_tokens_mean": "mean response length (tokens)"}
        own |= {"model_name": facts.name, "eval_results": [
            EvalResult(task_type=own["pipeline_tag"], dataset_type=data_set or "prompts",
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
    """The rewards of a configuration, as a card names them; of a file only its name."""
    named = ([str((entry or {}).get("fn")) for entry in cfg.reward.fns.values()]
             if cfg.reward.fns else [str(cfg.reward.fn)])
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
