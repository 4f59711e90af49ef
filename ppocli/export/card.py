"""The model card of an export: metadata for the Hub and a page for people."""

from __future__ import annotations

import json
import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from ppocli.config.resolved import PYTHON_OBJECT
from ppocli.config.schema import TrainConfig
from ppocli.display.figures import clean, figure
from ppocli.export.base_model import split_card
from ppocli.export.facts import Facts, SamplePair
from ppocli.export.masking import Mask
from ppocli.export.trained_card import (
    LIBRARY,
    PEFT_LIBRARY,
    TAGS,
    USER_BEGIN,
    USER_END,
    figure_rows,
    hub_name,
    pipeline,
    reward_names,
    shown_model,
)
from ppocli.version import __version__

CARD = "README.md"
KL = "kl_mean"
PLACEHOLDER = "*Write about this model here: what is between the two comments is kept.*"
_TEMPLATE = Path(__file__).parent / "model_card.md.j2"
_LONGEST_TEXT = 300
_SPECIAL = re.compile(r"[\\`*_\[\]{}()#!|~$@^]")
_LINK = re.compile(r"\b(www|https?|ftp|mailto|xmpp)([.:])", re.IGNORECASE)
"""what Markdown makes a link of without being asked"""
_STORED = re.compile(r"^(.*The weights are stored as )[\w+?]+\.$", re.MULTILINE)
_LOCATION = re.compile(r'^name = ".*"$', re.MULTILINE)
_SHOWN_VERSIONS = ("ppocli", "torch", "transformers", "python")


@dataclass(frozen=True, slots=True)
class CardInputs:
    """What the card says beside the facts of the run."""

    facts: Facts
    dtype: str
    location: str
    """what a reader passes to ``from_pretrained``"""
    chat: bool
    """the tokenizer has a chat template"""
    pair: bool
    """the model is an encoder-decoder"""
    value_head: list[str]
    """names of the value function's files"""
    curve: bool
    adapter: bool = False
    """it is an adapter's own folder, which PEFT loads"""


def escaped(text: str) -> str:
    """Text of a model or a user as inline Markdown that shows exactly that: no markup, no HTML, no
    links, no line breaks, no control characters; cut at 300 characters."""
    text = clean(text)
    if len(text) > _LONGEST_TEXT:
        text = text[:_LONGEST_TEXT - 1] + "…"
    text = text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    text = _SPECIAL.sub(lambda match: "\\" + match[0], text)
    return _LINK.sub(r"\1\\\2", text).strip()


def render_card(inputs: CardInputs, previous: str | None, mask: Mask) -> str:
    """The text of README.md.

    Args:
        previous: the card that is replaced, if any: the user's text in it, and metadata that this
            one hasn't, stay.
    """
    from jinja2 import Environment, StrictUndefined

    # Markdown, not HTML: everything that comes from outside passes ``escaped``
    environment = Environment(undefined=StrictUndefined, keep_trailing_newline=True,
                              autoescape=False)
    kept = None if previous is None else user_text(previous)
    old = {} if previous is None else split_card(previous)[0]
    values: dict[str, Any] = {
        "user_begin": USER_BEGIN, "user_end": USER_END, "user_text": kept or PLACEHOLDER,
        "metadata": metadata(inputs.facts, old, inputs.pair, inputs.adapter).to_yaml().strip(),
        "version": __version__,
        "auto": ("AutoPeftModel" if inputs.adapter else "AutoModel")
        + ("ForSeq2SeqLM" if inputs.pair else "ForCausalLM"),
        "adapter": inputs.adapter,
        "title": escaped(inputs.facts.name), "dtype": inputs.dtype,
        "location": json.dumps(inputs.location), "value_head": inputs.value_head,
        "config": None, "command": None, "versions": _versions(inputs.facts.versions),
        "chat": inputs.chat, "example": json.dumps(_example(inputs.facts), ensure_ascii=False),
        "trust": ""}
    if inputs.facts.config is not None:
        values |= _of_training(inputs, inputs.facts.config)
    text = environment.from_string(_TEMPLATE.read_text(encoding="utf-8")).render(values)
    return re.sub(r"\n{3,}", "\n\n", mask(text)).rstrip() + "\n"


def _of_training(inputs: CardInputs, config: TrainConfig) -> dict[str, Any]:
    facts = inputs.facts
    assert facts.base is not None  # every run has one
    assert facts.run is not None
    base = escaped(facts.base.shown)
    link = facts.base.hub_name
    command = facts.command or ""
    from_python = PYTHON_OBJECT in command
    figures = [(_code(name), old, new)
               for name, old, new in figure_rows(facts.before, facts.after)]
    return {
        "config": config, "step": facts.step, "total_steps": facts.run.total_steps,
        "rollouts": config.ppo.num_rollouts, "reward": escaped(reward_names(config)),
        "base": f"[{base}](https://huggingface.co/{link})" if link else base,
        "prompts": escaped(_prompts(config)), "eval_prompts": escaped(_eval_prompts(config)),
        "sampling": _sampling(config), "curve": inputs.curve,
        "figures": figures,
        "evaluation": (evaluation := _separate_evaluation(facts.evaluation)),
        "kl": any(name == f"`{KL}`" for name, *_ in
                  [*figures, *(evaluation["rows"] if evaluation else [])]),
        "samples": [_shown(sample) for sample in facts.samples],
        "changes": [{"key": _code(change.key), "before": escaped(change.before),
                     "after": escaped(change.after), "step": change.step}
                    for change in facts.run.changes],
        "command": None if from_python or not command else command.replace("```", ""),
        "local_files": any(part.startswith(("/", "'/")) or "=/" in part or ":/" in part
                           for part in command.split()),
        "trust": ", trust_remote_code=True" if config.model.trust_remote_code else ""}


def metadata(facts: Facts, previous: dict[str, Any], pair: bool, adapter: bool = False) -> Any:
    """The card's front matter as ``huggingface_hub.ModelCardData``; keys that ``previous`` has
    and this training doesn't determine are kept."""
    from huggingface_hub import ModelCardData

    own: dict[str, Any] = {"library_name": PEFT_LIBRARY if adapter else LIBRARY,
                           "pipeline_tag": pipeline(pair),
                           "tags": list(TAGS)}
    if facts.base is not None:
        own |= facts.base.license
        if facts.base.hub_name is not None:
            own |= {"base_model": facts.base.hub_name,
                    "base_model_relation": "adapter" if adapter else "finetune"}
    config = facts.config
    if config is not None and (data_set := _hub_data_set(config.prompts.path)) is not None:
        own["datasets"] = [data_set]
    if config is not None and facts.after:
        own |= {"model_name": facts.name, "eval_results": _results(facts, config, pipeline(pair))}
    kept = {key: value for key, value in previous.items()
            if key not in own and key not in ("model-index", "model_name", "eval_results")}
    if isinstance(previous.get("tags"), list):
        own["tags"] += [tag for tag in previous["tags"] if tag not in own["tags"]]
    return ModelCardData(**own, **kept)


def _results(facts: Facts, config: TrainConfig, task: str) -> list[Any]:
    from huggingface_hub import EvalResult

    source = config.prompts.eval.path or config.prompts.path
    data_set = _hub_data_set(source)
    shown = _eval_prompts(config)
    names = [name for name, _, _ in figure_rows(facts.before, facts.after)]
    return [EvalResult(task_type=task, dataset_type=data_set or "prompts", dataset_name=shown,
                       metric_type=name, metric_name=_metric_name(name, config),
                       metric_value=facts.after[name])
            for name in names if math.isfinite(facts.after[name])]


def _metric_name(name: str, config: TrainConfig) -> str:
    known = {"reward_mean": f"mean reward ({reward_names(config)})",
             KL: "KL from the starting model (nats per response)",
             "response_tokens_mean": "mean response length (tokens)"}
    return known.get(name, name)


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


def render_again(card: str, location: str, dtype: str, previous: str | None, mask: Mask) -> str:
    """The card of an export that is exported once more: what the earlier one told, with where it
    lies now and how it's stored.

    Args:
        previous: the card that is replaced, if any: as for :func:`render_card`.
    """
    text = _STORED.sub(lambda match: f"{match[1]}{dtype}.", with_location(card, location))
    kept = None if previous is None else user_text(previous)
    if kept is not None:
        text = with_user_text(text, kept)
    data, body = split_card(text)
    old = {} if previous is None else split_card(previous)[0]
    if added := {key: value for key, value in old.items() if key not in data}:
        front = yaml.safe_dump(data | added, sort_keys=False, allow_unicode=True)
        text = f"---\n{front}---\n{body}"
    return mask(text)


def _hub_data_set(path: str | None) -> str | None:
    if path is None or path == PYTHON_OBJECT:
        return None
    return hub_name(path)


def _prompts(config: TrainConfig) -> str:
    prompts = config.prompts
    if prompts.path is not None and prompts.path != PYTHON_OBJECT:
        return shown_model(prompts.path)
    if prompts.items or prompts.path == PYTHON_OBJECT:
        return "given inline"
    return "the beginning-of-sequence token"


def _eval_prompts(config: TrainConfig) -> str:
    path = config.prompts.eval.path
    if path is not None and path != PYTHON_OBJECT:
        return shown_model(path)
    if config.prompts.eval.items:
        return "prompts given inline"
    return f"prompts of {_prompts(config)}"


def _sampling(config: TrainConfig) -> str:
    spec = config.generation
    parts = [f"up to {spec.max_new_tokens} tokens"]
    if not spec.do_sample:
        return f"{parts[0]}, greedy"
    parts.append(f"temperature {spec.temperature:g}")
    parts += [f"top-k {spec.top_k}"] if spec.top_k else []
    parts += [f"top-p {spec.top_p:g}"] if spec.top_p < 1 else []
    return ", ".join(parts)


def _shown(sample: SamplePair) -> dict[str, str]:
    return {"prompt": escaped(sample.prompt), "before": escaped(sample.before),
            "after": escaped(sample.after), "score_before": _score(sample.score_before),
            "score_after": _score(sample.score_after)}


def _separate_evaluation(evaluation: dict[str, Any] | None) -> dict[str, Any] | None:
    """What eval.json says: how many samples, and (figure, value, standard error)."""
    if evaluation is None:
        return None
    figures, errors = (_numbers(evaluation.get(name)) for name in ("figures", "stderr"))
    samples = evaluation.get("samples")
    return {"of": f", of {samples} samples" if isinstance(samples, int) else "",
            "rows": [(_code(name), value, figure(errors.get(name), 3))
                     for name, _, value in figure_rows({}, figures)]}


def _numbers(values: Any) -> dict[str, float]:
    """The finite numbers of a mapping read from a file."""
    found = values.items() if isinstance(values, dict) else ()
    return {str(name): float(value) for name, value in found
            if isinstance(value, (int, float)) and math.isfinite(value)}


def _code(name: str) -> str:
    return f"`{name}`" if re.fullmatch(r"[\w/.-]+", name) else escaped(name)


def _score(value: float | None) -> str:
    return "" if value is None or not math.isfinite(value) else f" ({value:.2f})"


def _example(facts: Facts) -> str:
    prompt = facts.samples[0].prompt if facts.samples else "Once upon a time"
    return clean(prompt)[:_LONGEST_TEXT]


def _versions(versions: dict[str, str]) -> str:
    return ", ".join(f"{name} {escaped(str(versions[name]))}" for name in _SHOWN_VERSIONS
                     if name in versions)
