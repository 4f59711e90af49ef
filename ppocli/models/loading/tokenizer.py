"""From a name or a folder to a tokenizer with its chat template, the values and the date that the
template reads; which ids and texts end a response; whether prompts are rendered with the template.

The tokenizer is checked for faults that transformers lets pass: no vocabulary, or a damaged
setting. Importing this module imports neither torch nor transformers.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Collection, Mapping
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from types import MethodType
from typing import TYPE_CHECKING, Any

import jinja2.defaults
import jinja2.meta

from ppocli.config import schema
from ppocli.config.schema import GenerationConfig, ModelConfig
from ppocli.config.text import first_line, short_path, suggestion
from ppocli.errors import ConfigError, InputError
from ppocli.runs import model_files

if TYPE_CHECKING:
    from ppocli.models.loading.language_model import LoadedLM

log = logging.getLogger("ppocli")

FILE, VALUES = "model.chat_template", "model.chat_template_kwargs"
_STANDARD_VARIABLES = {
    "messages", "tools", "documents", "add_generation_prompt", "continue_final_message",
    "raise_exception", "strftime_now", *jinja2.defaults.DEFAULT_NAMESPACE}
"""variables that transformers hands to every template"""
_MARKS = re.compile(r"\{%[-+]?\s*(end)?generation\s*[-+]?%\}")
"""blocks that transformers adds to Jinja"""
_DATE = re.compile(r"strftime_now\(\s*(['\"])(.*?)\1\s*\)")
"""how templates read the date: the second group is the format"""


def load_tokenizer(cfg: ModelConfig) -> Any:
    """The policy's tokenizer, padding side, pad token and chat template set.

    Raises:
        InputError: none found, empty, or unreadable; or the chat template that is asked for is.
    """
    import transformers

    from ppocli.models.loading.model_config import loading

    key = "model.tokenizer_path" if cfg.tokenizer_path else "model.path"
    name = cfg.tokenizer_path or cfg.path
    revision = cfg.revision if cfg.tokenizer_path is None else None
    source = model_files.find_model(name, key=key, revision=revision, needs="tokenizer",
                                    adapters=True)
    if Path(source).is_dir() and not model_files.has_tokenizer(source):
        source, revision = model_files.find_whole(name, key=key, revision=revision,
                                                  needs="tokenizer")
    with loading(f"tokenizer of {name}", key,
                              fix="give a tokenizer folder: model.tokenizer_path=/path"):
        tokenizer = transformers.AutoTokenizer.from_pretrained(
            source, revision=revision, trust_remote_code=cfg.trust_remote_code)
        tokenizer("")  # a damaged setting shows only in use
    if len(tokenizer) == 0 or tokenizer.vocab_size == 0:
        raise InputError(f"No tokenizer in {name} (expected tokenizer.json or a vocabulary file).",
                         where=key, fix="save the tokenizer there, or set "
                         "model.tokenizer_path=/path")
    tokenizer.padding_side = "left"
    if tokenizer.pad_token_id is None:
        if tokenizer.eos_token_id is None:
            raise InputError(f"The tokenizer of {name} has neither a pad nor an EOS token.",
                             where=key, fix="add one with tokenizer.add_special_tokens and save it")
        tokenizer.pad_token = tokenizer.eos_token
        log.info("The tokenizer has no pad token: its EOS %r pads (masks come from lengths).",
                 tokenizer.eos_token)
    if cfg.chat_template is not None:
        tokenizer.chat_template = read_template(cfg.chat_template)
    if cfg.chat_template_kwargs:
        tokenizer.chat_template = with_values(
            tokenizer.chat_template, cfg.chat_template_kwargs, tokenizer.special_tokens_map)
    stop_clock(tokenizer, cfg.chat_template_date)
    return tokenizer


def stop_rules(tokenizer: Any, loaded: LoadedLM, generation: GenerationConfig
               ) -> tuple[tuple[int, ...], tuple[str, ...]]:
    """The ids that end a response (the tokenizer's EOS, the model's, of which there may be several,
    unless ``ignore_eos`` leaves them out, and ``stop_token_ids``), and the texts that do.

    A stop sequence that is one token of its own (``<|im_end|>``) becomes an id: such tokens are
    left out of decoded text, where it would never be found.

    Raises:
        ConfigError: an id is never sampled, or a text has a special token within.
    """
    from ppocli.models.head import vocabulary_of

    added_tokens, declared = tokenizer.get_added_vocab(), loaded.generation_config.eos_token_id
    sequences = generation.stop_sequences
    vocabulary = vocabulary_of(loaded.lm)
    absent = set(vocabulary.absent)
    if never := [i for i in generation.stop_token_ids if i >= vocabulary.rows or i in absent]:
        raise ConfigError(f"Token {never[0]} would never end a response: the model has "
                          f"{vocabulary.rows - len(absent)} tokens, and that id is none of them.",
                          where="generation.stop_token_ids", fix="take it out")
    for token, number in added_tokens.items():
        odd = [text for text in sequences if token in text and text not in added_tokens]
        if odd and not tokenizer.decode([number], skip_special_tokens=True):
            raise ConfigError(f"The stop text {odd[0]!r} would never be found: {token} is a special"
                              " token, which decoded text leaves out.",
                              where="generation.stop_sequences", fix=f"take {token} out of the text"
                              f", or end responses at it: generation.stop_token_ids=[{number}]")
    ids = {*generation.stop_token_ids, *(added_tokens[s] for s in sequences if s in added_tokens)}
    if not generation.ignore_eos:
        ids |= {tokenizer.eos_token_id,
                *(declared if isinstance(declared, list) else [declared])} - {None}
    return (tuple(sorted(i for i in ids if 0 <= i < vocabulary.size and i not in absent)),
            tuple(s for s in sequences if s not in added_tokens))


# Chat templates -----------------------------------------------------------------------------------

def read_template(path: str) -> str:
    """The chat template in a file.

    Raises:
        InputError: it can't be read, is malformed, or no chat template.
    """
    fix = "give a file that holds a Jinja template of messages, each with role and content"
    try:
        template = Path(path).read_text("utf-8")
        reads = _variables(template)
    except jinja2.TemplateSyntaxError as error:
        raise InputError(f"The chat template is malformed: {error.message}",
                         where=f"{FILE}, {path}:{error.lineno}", fix="mend that line") from error
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"The chat template can't be read: {first_line(error)}", where=FILE,
                         fix=fix) from error
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
        InputError: there is no template, or none that reads such a name.
    """
    templates = chat_template if isinstance(chat_template, dict) else {"": chat_template or ""}
    variables = set().union(*map(_variables, templates.values())).difference(
        _STANDARD_VARIABLES, special)
    for name in values:
        if name not in variables:
            raise InputError(f"The chat template reads no {name!r}, but "
                             f"{', '.join(sorted(variables)) or 'messages alone'}. "
                             f"{suggestion(str(name), variables)}".rstrip(),
                             where=f"{VALUES}.{name}", fix="take it out")
    # transformers removes the line break after a block
    lines = "".join(f"{{%- set {name} = {name} | default({value!r}) %}}\n"
                    for name, value in values.items())
    # a model that was trained with these values has the lines already
    prefixed = {name: template if template.startswith(lines) else lines + template
                for name, template in templates.items()}
    return prefixed if isinstance(chat_template, dict) else prefixed[""]


def _variables(template: str) -> set[str]:
    """Variables that a template reads and doesn't set itself."""
    jinja = jinja2.Environment(extensions=["jinja2.ext.loopcontrols"])
    return jinja2.meta.find_undeclared_variables(jinja.parse(_MARKS.sub("", template)))


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

    def get_chat_template(self: Any, *args: Any, **kwargs: Any) -> str:
        template: str = type(self).get_chat_template(self, *args, **kwargs)
        return _DATE.sub(lambda call: repr(moment.strftime(call[2])), template)

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
    chat, trained = cfg.prompts.chat, model_files.trained_with_template(model, revision)
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
