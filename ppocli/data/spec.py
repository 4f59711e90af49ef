"""What one set of prompts is made from: the keys of ``prompts``, or of ``prompts.eval`` with what
it inherits."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ppocli.config.schema import PromptsConfig
from ppocli.errors import ConfigError

_INHERITED = ("name", "split", "column", "columns", "first_words", "template", "chat",
              "max_length", "truncation_side")
"""what ``prompts.eval`` takes from ``prompts`` where its own key is null, as it stands there"""


@dataclass(frozen=True, slots=True)
class PromptSpec:
    """Checked settings of one prompt set. Made here, read by the other modules of the room."""

    key: str
    """``prompts`` or ``prompts.eval``: how errors name the settings"""
    path: str | None
    path_key: str
    """the key that gave ``path``, which an evaluation set may have inherited"""
    name: str | None
    split: str
    split_asked: bool
    """whether the split was set for this very source, so that ignoring it is worth a note"""
    items: list[Any] | None
    column: str
    columns: list[str] | None
    limit: int | None
    first_words: int | None
    length_sampler: tuple[int, int] | None
    template: str | None
    chat: bool
    max_length: int | None
    truncation_side: str

    @property
    def has_source(self) -> bool:
        """False if the prompts are the BOS token alone."""
        return self.path is not None or self.items is not None


def training_spec(cfg: PromptsConfig, items: list[Any] | None) -> PromptSpec:
    """The training prompts; ``items``, given from Python, replace ``prompts.path``.

    Raises:
        ConfigError: two sources at once, a malformed length sampler, or a rendering without source.
    """
    if items is None:
        items = cfg.items
    spec = PromptSpec(
        key="prompts", path=None if items is not None else cfg.path, path_key="prompts.path",
        split_asked=cfg.split != "train", items=_as_list(items), limit=cfg.limit,
        length_sampler=_range("prompts", cfg.length_sampler),
        **{name: getattr(cfg, name) for name in _INHERITED})
    _no_rendering_without_source(spec)
    return _checked(spec)


def evaluation_spec(cfg: PromptsConfig, items: list[Any] | None) -> PromptSpec:
    """The evaluation prompts. Keys of ``prompts.eval`` that are null take those of ``prompts``.

    The result has a source only if one was given for evaluation: ``items``, ``prompts.eval.items``,
    ``prompts.eval.path``, or another ``split`` or ``name`` of ``prompts.path``.

    Raises:
        ConfigError: as :func:`training_spec`.
    """
    own = cfg.eval
    if items is None:
        items = own.items
    path = own.path
    if path is None and items is None and (own.split is not None or own.name is not None):
        path = cfg.path
    return _checked(PromptSpec(
        key="prompts.eval", path=path,
        path_key="prompts.path" if own.path is None else "prompts.eval.path",
        split_asked=own.split is not None, items=_as_list(items), limit=own.limit,
        length_sampler=_range("prompts.eval", _own_or_inherited(cfg, "length_sampler")),
        **{name: _own_or_inherited(cfg, name) for name in _INHERITED}))


def _own_or_inherited(cfg: PromptsConfig, name: str) -> Any:
    own = getattr(cfg.eval, name)
    return getattr(cfg, name) if own is None else own


def _as_list(items: Any) -> list[Any] | None:
    if items is None:
        return None
    if isinstance(items, str | bytes | Mapping):
        raise ConfigError(f"Inline prompts must be a list, not one {type(items).__name__}.",
                          where="prompts.items", fix="put it in a list: [...]")
    return list(items)


def _checked(spec: PromptSpec) -> PromptSpec:
    if spec.chat and spec.length_sampler is not None:
        raise ConfigError(f"{spec.key}.length_sampler would cut off the end of the chat template.",
                          where=f"{spec.key}.length_sampler={list(spec.length_sampler)}",
                          fix=f"{spec.key}.length_sampler=null or {spec.key}.chat=false")
    return spec


def _no_rendering_without_source(spec: PromptSpec) -> None:
    if spec.has_source:
        return
    asked = [name for name, value in (("template", spec.template), ("chat", spec.chat or None),
                                      ("first_words", spec.first_words),
                                      ("length_sampler", spec.length_sampler)) if value is not None]
    if asked:
        raise ConfigError(f"{spec.key}.{asked[0]} is set but there are no prompts to apply it to.",
                          where=f"{spec.key}.{asked[0]}",
                          fix=f"{spec.key}.path=FILE or {spec.key}.items=[...]")


def _range(key: str, bounds: list[int] | None) -> tuple[int, int] | None:
    if bounds is None:
        return None
    if len(bounds) != 2 or not 1 <= bounds[0] <= bounds[1]:
        raise ConfigError(f"{key}.length_sampler={list(bounds)} is not [min, max] with "
                          "1 <= min <= max.", where=f"{key}.length_sampler",
                          fix=f"{key}.length_sampler=[2,8]")
    return bounds[0], bounds[1]
