"""From a name or a folder to a tokenizer. It is checked for faults that transformers lets pass: no
vocabulary, or a damaged setting."""

import logging
from pathlib import Path
from typing import Any

import transformers

from ppocli.config.schema import ModelConfig
from ppocli.errors import InputError
from ppocli.models.loading import model_config
from ppocli.models.loading.chat_template import read_template, stop_clock, with_values
from ppocli.storage import model_files

log = logging.getLogger("ppocli")


def load_tokenizer(cfg: ModelConfig) -> Any:
    """The policy's tokenizer, padding side, pad token and chat template set.

    Raises:
        InputError: none found, empty, or unreadable; or the chat template that is asked for is.
    """
    key = "model.tokenizer_path" if cfg.tokenizer_path else "model.path"
    name = cfg.tokenizer_path or cfg.path
    revision = cfg.revision if cfg.tokenizer_path is None else None
    source = model_files.find_model(name, key=key, revision=revision, needs="tokenizer",
                                    adapters=True)
    if Path(source).is_dir() and not model_files.has_tokenizer(source):
        source, revision = model_files.find_whole(name, key=key, revision=revision,
                                                  needs="tokenizer")
    with model_config.loading(f"tokenizer of {name}", key,
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
