"""Chat templates from files, values for their variables, the date among them; and whether prompts
are rendered with the template."""

import logging
import re
from collections.abc import Collection, Mapping
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from types import MethodType
from typing import Any

import jinja2.defaults
import jinja2.meta

from ppocli.config import schema
from ppocli.config.text import first_line, short_path, suggestion
from ppocli.errors import ConfigError, InputError
from ppocli.runs.model_files import trained_with_template

log = logging.getLogger("ppocli")

FILE, VALUES = "model.chat_template", "model.chat_template_kwargs"
_STANDARD_VARIABLES = {
    "messages", "tools", "documents", "add_generation_prompt", "continue_final_message",
    "raise_exception", "strftime_now", *jinja2.defaults.DEFAULT_NAMESPACE}
"""variables that transformers hands to every template"""
_MARKS = re.compile(r"\{%[-+]?\s*(end)?generation\s*[-+]?%\}")
"""blocks that transformers adds to Jinja"""


def read_template(path: str) -> str:
    """The chat template in a file.

    Raises:
        InputError: it can't be read, is malformed, or no chat template.
    """
    fix = "give a file that holds a Jinja template of messages, each with role and content"
    try:
        template = Path(path).read_text("utf-8")
        reads = _variables(template)
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"The chat template can't be read: {first_line(error)}", where=FILE,
                         fix=fix) from error
    except jinja2.TemplateSyntaxError as error:
        raise InputError(f"The chat template is malformed: {error.message}",
                         where=f"{FILE}, {path}:{error.lineno}", fix="mend that line") from error
    if "messages" not in reads:
        raise InputError(f"{path} reads no messages: it is no chat template.", where=FILE, fix=fix)
    return template


def with_values(chat_template: Any, values: Mapping[str, Any], special: Collection[str]) -> Any:
    """A tokenizer's template, or several by name, with lines in front that set ``values`` as
    defaults, so that the saved model's conversations are rendered as in training. Passing another
    value overrides a default.

    Args:
        special: names of special tokens, which the user can't set.

    Raises:
        InputError: there is no template, it is malformed, or it reads no such name; or a value
            can't be written in Jinja.
    """
    if not chat_template:
        raise InputError("The tokenizer has no chat template that could read values.",
                         where=VALUES, fix=f"leave them out, or {FILE}=FILE")
    templates = chat_template if isinstance(chat_template, dict) else {"": chat_template}
    try:
        variables = set().union(*map(_variables, templates.values())).difference(
            _STANDARD_VARIABLES, special)
    except jinja2.TemplateSyntaxError as error:
        raise InputError(f"The tokenizer's chat template is malformed: {error.message}",
                         where=f"{VALUES}, line {error.lineno} of the template",
                         fix=f"{FILE}=FILE, with one that isn't") from error
    for name, value in values.items():
        if name not in variables:
            raise InputError(f"The chat template reads no {name!r}, but "
                             f"{', '.join(sorted(variables)) or 'messages alone'}. "
                             f"{suggestion(str(name), variables)}".rstrip(),
                             where=f"{VALUES}.{name}", fix="take it out")
        if not _survives_jinja(value):
            raise InputError(f"A template can't contain {value!r}.", where=f"{VALUES}.{name}",
                             fix="give texts, finite numbers, true, false, null, or lists or "
                             "mappings of them")
    # transformers removes the line break after a block
    lines = "".join(f"{{%- set {name} = {name} | default({value!r}) %}}\n"
                    for name, value in values.items())
    # a model that was trained with these values has the lines already
    prefixed = {name: template if template.startswith(lines) else lines + template
                for name, template in templates.items()}
    return prefixed if isinstance(chat_template, dict) else prefixed[""]


def _survives_jinja(value: Any) -> bool:
    """Whether Jinja reads a value's Python spelling as the same value."""
    try:
        return bool(jinja2.Environment().compile_expression(repr(value))() == value)
    except jinja2.TemplateError:
        return False


def _variables(template: str) -> set[str]:
    """Variables that a template reads and doesn't set itself."""
    jinja = jinja2.Environment(extensions=["jinja2.ext.loopcontrols"])
    return jinja2.meta.find_undeclared_variables(jinja.parse(_MARKS.sub("", template)))


# The date -----------------------------------------------------------------------------------------

def tells_date(tokenizer: Any) -> bool:
    """Whether a chat template of this tokenizer reads the date."""
    template = getattr(tokenizer, "chat_template", None)
    return "strftime_now" in str(template.values() if isinstance(template, dict) else template)


def stop_clock(tokenizer: Any, date: str | None) -> None:
    """Make this tokenizer's chat templates use ``date`` (``model.chat_template_date``) as the
    current date; None: the real one. The saved tokenizer doesn't change."""
    if date is None or not tells_date(tokenizer):
        return
    moment = datetime.fromisoformat(date)

    def get_chat_template(self: Any, chat_template: str | None = None, tools: Any = None) -> str:
        from ppocli.models.transformers_internals import template_at

        return template_at(type(self).get_chat_template(self, chat_template, tools), moment)

    tokenizer.get_chat_template = MethodType(get_chat_template, tokenizer)


def tokenizers_of(reward: Any) -> list[Any]:
    """The tokenizers of reward models."""
    return [tokenizer for part in reward.parts
            if (tokenizer := getattr(part.call, "tokenizer", None)) is not None]


def present() -> str:
    """The date and time of this machine, for ``model.chat_template_date``."""
    return datetime.now().isoformat(timespec="seconds")


# Whether prompts are rendered ---------------------------------------------------------------------

def decided(cfg: schema.TrainConfig, model: str, revision: str | None = None, *,
            name: str | None = None) -> schema.TrainConfig:
    """``cfg`` with ``prompts.chat`` as the model was trained, unless it is set; the reason is
    logged.

    Args:
        name: of the model in messages (default: its path).

    Raises:
        ConfigError: another setting of prompts forbids the chat template.
    """
    chat, trained = cfg.prompts.chat, trained_with_template(model, revision)
    name = name or short_path(model)
    if trained is None or chat == trained:
        return cfg
    chat = trained if chat is None else chat
    why = (f"{name} was trained {'with' if trained else 'without'} its chat template, and "
           f"prompts.chat={str(chat).lower()} "
           f"{'renders prompts with it' if chat else 'uses prompts as they are'}")
    log.info("%s", why)
    if chat == cfg.prompts.chat:
        return cfg
    if chat and cfg.prompts.length_sampler:
        raise ConfigError(f"{why}; but prompts.length_sampler would cut off its end.",
                          where="prompts.length_sampler", fix="prompts.chat=false")
    return replace(cfg, prompts=replace(cfg.prompts, chat=chat))
