"""From a name or a folder to a tokenizer. It is checked for faults that transformers lets pass: no
vocabulary, or a damaged setting. Also which of its ids end a response."""

import logging
from pathlib import Path
from typing import Any

import transformers

from ppocli.config.schema import GenerationConfig, ModelConfig
from ppocli.errors import ConfigError, InputError
from ppocli.models.loading import model_config
from ppocli.models.loading.chat_template import read_template, stop_clock, with_values
from ppocli.models.loading.language_model import LoadedLM
from ppocli.models.trunk import vocabulary_of
from ppocli.runs import model_files

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


def stop_rules(tokenizer: Any, loaded: LoadedLM, generation: GenerationConfig
               ) -> tuple[tuple[int, ...], tuple[str, ...]]:
    """The ids that end a response (the tokenizer's EOS, the model's, of which there may be several,
    unless ``ignore_eos`` leaves them out, and ``stop_token_ids``), and the texts that do.

    A stop sequence that is one token of its own (``<|im_end|>``) becomes an id: such tokens are
    left out of decoded text, where it would never be found.

    Raises:
        ConfigError: an id is never sampled, or a text has a special token within.
    """
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
