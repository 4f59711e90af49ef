"""Tiny tokenizers for the tests of prompts."""

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

WORDS = ["the", "a", "good", "bad", "film", "was", "is", "very", "not", "it", "i", "you", "and",
         "so", "end", "user", "assistant", ":", "?", "!", "."]
CHATML = ("{{ bos_token }}{% for m in messages %} {{ m.role }} : {{ m.content }} </s>{% endfor %}"
          "{% if add_generation_prompt %} assistant :{% endif %}")


def words(*, front: bool = False, behind: bool = False, bos: bool = True, eos: bool = True,
          chat: str | None = None, unknown: bool = True) -> PreTrainedTokenizerFast:
    """One token a word: <s> 0, </s> 1, <unk> 2, then WORDS.

    ``front`` and ``behind`` make it add BOS and EOS; without ``unknown`` other words are errors.
    """
    specials = ["<s>", "</s>", "<unk>"]
    vocabulary = {word: i for i, word in enumerate([*specials, *WORDS])}
    if not unknown:
        del vocabulary["<unk>"]
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    if front or behind:
        single = f"{'<s> ' if front else ''}$A{' </s>' if behind else ''}"
        backend.post_processor = processors.TemplateProcessing(
            single=single, special_tokens=[("<s>", 0), ("</s>", 1)])
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<s>" if bos else None,
        eos_token="</s>" if eos else None, unk_token="<unk>" if unknown else None,
        chat_template=chat)


def utf8_bytes() -> PreTrainedTokenizerFast:
    """One token a byte, like GPT-2 without merges; EOS 256 and no BOS of its own."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE({char: i for i, char in enumerate(alphabet)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|endoftext|>")


def ids(text: str) -> list[int]:
    """The ids of ``words()`` for a text of WORDS and <s>, </s>."""
    known = ["<s>", "</s>", "<unk>", *WORDS]
    return [known.index(word) for word in text.split()]
