"""How a model is made to continue prompts. Found out when it is loaded, kept on it."""

from __future__ import annotations

from enum import Enum
from typing import Any


class Decoding(Enum):
    """Ways of decoding, the fastest first."""

    STEPS = "steps"
    """ppocli's own loop feeds each token with the keys and values of those before it"""
    LIBRARY = "library"
    """transformers' ``generate``, which knows what else a model keeps from token to token"""
    UNCACHED = "uncached"
    """the same, each token by a pass over all before it"""


_NAME = "ppocli_decoding"


def decoding_of(lm: Any) -> Decoding:
    """How a model decodes; by steps where nobody has said otherwise."""
    found: Decoding = getattr(lm, _NAME, Decoding.STEPS)
    return found


def set_decoding(lm: Any, decoding: Decoding) -> None:
    """Make a model decode so from now on."""
    setattr(lm, _NAME, decoding)


def costs_of(lm: Any) -> str | None:
    """What it costs that a model can't be decoded by ppocli's own loop, as a sentence; None where
    it can."""
    if decoding_of(lm) is Decoding.STEPS:
        return None
    every = ("" if decoding_of(lm) is Decoding.LIBRARY else
             ", and it reads all tokens so far anew for each new one")
    return (f"ppocli's own loop can't step {type(lm).__name__}: responses are decoded by "
            "transformers' generate, prompts of one length at a time, and those that have ended "
            f"cost as much as the others until the last has{every}. Nothing else changes.")
