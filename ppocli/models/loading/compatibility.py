"""Models that stand beside the policy, a reference or a value model of another path: they must read
the policy's tokens as the policy does."""

from __future__ import annotations

from typing import Any

from ppocli.errors import InputError
from ppocli.models.loading.model_config import max_positions
from ppocli.models.trunk import has_encoder
from ppocli.parallel.deepspeed_internals import whole_shape
from ppocli.storage.model_files import find_model


def check_same_tokens(tokenizer: Any, policy: Any, other: Any, *, name: str, key: str,
                    trust_remote_code: bool = False) -> None:
    """Refuse a model that takes prompts otherwise than the policy, or knows other tokens.

    Args:
        tokenizer: the policy's.
        policy, other: models; of ``other`` a trunk will do.
        name: where ``other`` comes from.
        key: that names it.

    Raises:
        InputError: one has an encoder and the other hasn't, or an id means another token.
    """
    if has_encoder(policy) != has_encoder(other):
        kinds = ("an encoder-decoder", "a causal model")
        theirs, ours = kinds if has_encoder(other) else reversed(kinds)
        raise InputError(f"{name} is {theirs}, the policy {ours}.", where=key,
                         fix=f"give {ours} of the policy's vocabulary")
    own = tokenizer.get_vocab()
    highest = max(own.values(), default=-1)
    rows = whole_shape(other.get_input_embeddings().weight)[0]
    if highest >= rows:
        raise InputError(f"The policy's tokenizer has ids up to {highest}, {name} embeds only "
                         f"{rows}.", where=key,
                         fix="give a model of the policy's own family and vocabulary")
    theirs_by_token = _vocabulary(name, key, trust_remote_code)
    if theirs_by_token is None:
        return
    odd = next((token for token, i in sorted(own.items(), key=lambda item: item[1])
                if theirs_by_token.get(token, i) != i), None)
    missing = sum(token not in theirs_by_token for token in own)
    if odd is not None or missing > len(own) // 2:
        what = (f"{odd!r} is {own[odd]} for the policy and {theirs_by_token[odd]} for {name}"
                if odd is not None else f"{name} lacks {missing} of the policy's {len(own)} tokens")
        raise InputError(f"The tokenizers differ: {what}.", where=key,
                         fix="give a model with the policy's own tokenizer")


def _vocabulary(name: str, key: str, trust_remote_code: bool) -> dict[str, int] | None:
    """Token -> id of the tokenizer beside a model; None where there is none to compare with."""
    from transformers import AutoTokenizer

    try:
        source, _ = find_model(name, key=key, revision=None, needs="tokenizer")
        found = AutoTokenizer.from_pretrained(source, trust_remote_code=trust_remote_code)
    except Exception:  # weights alone are enough: ids are checked by their range
        return None
    vocabulary: dict[str, int] = found.get_vocab()
    return vocabulary or None


def check_reach(other: Any, *, prompt: int, response: int, name: str, key: str) -> None:
    """Refuse a model with fewer positions than the longest sample needs.

    Args:
        prompt, response: most tokens of either.

    Raises:
        InputError: the sample is longer.
    """
    limit = max_positions(other)
    needed = max(prompt, response) if has_encoder(other) else prompt + response
    if limit is not None and needed > limit:
        raise InputError(f"{name} has {limit} positions, samples take up to {needed}.", where=key,
                         fix="lower prompts.max_length or generation.max_new_tokens, or give a "
                         "model that reaches as far as the policy")
