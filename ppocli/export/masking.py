"""What leaves this machine holds no secret and no home folder."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ppocli.config.secrets import secret_values, without_secrets


class Mask:
    """Replaces values of token-like environment variables, texts shaped like tokens, and passwords
    in URLs by ``***``, and the home folder by ``~``.

    Args:
        environment: variables whose names may look like those of secrets.
        tokens: further texts that must not be shown.
        home: the folder written as ``~``.
    """

    def __init__(self, environment: Mapping[str, str], *, tokens: tuple[str, ...] = (),
                 home: Path | None = None) -> None:
        self._hidden = secret_values(environment) | set(tokens)
        homes = {str(home), os.path.realpath(home)} - {"/", "."} if home is not None else set()
        self._homes = [re.compile(re.escape(folder) + r"(?![\w.-])")
                       for folder in sorted(homes, key=len, reverse=True)]

    @staticmethod
    def of_this_process() -> Mask:
        """With this process's environment, the token of ``hf auth login``, the user's home."""
        from huggingface_hub import get_token

        try:
            home = Path.home()
        except RuntimeError:  # a user without a home
            home = None
        return Mask(os.environ, tokens=tuple(filter(None, [get_token()])), home=home)

    def __call__(self, text: str) -> str:
        """``text`` with nothing in it that is to stay here."""
        text = without_secrets(text, self._hidden)
        for pattern in self._homes:
            text = pattern.sub("~", text)
        return text

    def tree(self, value: Any) -> Any:
        """Plain data (mappings, lists, texts, numbers) with every text in it masked."""
        if isinstance(value, str):
            return self(value)
        if isinstance(value, Mapping):
            return {self.tree(key): self.tree(item) for key, item in value.items()}
        if isinstance(value, (list, tuple)):
            return [self.tree(item) for item in value]
        return value
