"""Rows from Arrow: Parquet files, saved data sets, and tables from Python.

Arrow gives each struct of a column every key that any row has, with null where a row had none. Such
keys are removed again, at any depth, so that rows equal those of JSON lines. Keys that were null
when the table was written can't be told from these; only the type ``Json()`` of `datasets` keeps
them. Columns are never removed, nor is the content of a message.
"""

import dataclasses
from collections.abc import Iterable, Iterator, Mapping
from typing import Any


def batch_rows(batches: Iterable[Any], schema: Any) -> Iterator[dict[str, Any]]:
    """The rows of record batches, by column name. Tables that `datasets` has written are decoded as
    it does, except images, audio and video, which stay as they are stored.

    Args:
        schema: of the batches (a ``pyarrow.Schema``).

    Raises:
        ValueError: a type that the installed `datasets` doesn't support.
    """
    import pyarrow as pa

    extended = b"huggingface" in (schema.metadata or {}) or any(
        "extension<arrow.json>" in str(field.type) for field in schema)
    if not extended:
        for batch in batches:
            for row in batch.to_pylist():
                yield {field.name: without_filled(row[field.name], field.type) for field in schema}
        return
    import datasets

    features = datasets.Features.from_arrow_schema(schema)
    for name, feature in features.items():
        if hasattr(feature, "decode") and hasattr(feature, "embed_storage"):
            features[name] = dataclasses.replace(feature, decode=False)
    info = datasets.DatasetInfo(features=features)
    for batch in batches:
        yield from dataset_rows(datasets.Dataset(pa.Table.from_batches([batch]), info,
                                                 fingerprint="rows"))


def dataset_rows(dataset: Any) -> Iterator[dict[str, Any]]:
    """The rows of a ``datasets.Dataset`` or ``IterableDataset``, by column name, as plain values
    whatever its format."""
    types = {} if dataset.features is None else {
        field.name: field.type for field in dataset.features.arrow_schema}
    for batch in dataset.with_format(None).iter(batch_size=1024):
        for cells in zip(*batch.values(), strict=True):
            yield {name: without_filled(cell, types[name]) if name in types else without_nulls(cell)
                   for name, cell in zip(batch, cells, strict=True)}


def without_filled(value: Any, kind: Any) -> Any:
    """``value``, of the Arrow type ``kind``, without keys of structs that are null."""
    import pyarrow as pa

    if isinstance(value, dict) and pa.types.is_struct(kind):
        return {field.name: without_filled(value[field.name], field.type) for field in kind
                if not _is_filler(value, field.name)}
    if isinstance(value, list) and pa.types.is_map(kind):
        return {key: without_filled(item, kind.item_type) for key, item in value}
    if isinstance(value, list) and hasattr(kind, "value_type"):
        return [without_filled(item, kind.value_type) for item in value]
    return value


def without_nulls(value: Any) -> Any:
    """Plain data without keys of mappings that are null: cells of pandas and polars, which have no
    Arrow type."""
    value = value.tolist() if hasattr(value, "tolist") else value  # numpy's arrays, from pandas
    if isinstance(value, Mapping):
        return {str(key): without_nulls(item) for key, item in value.items()
                if not _is_filler(value, key)}
    return [without_nulls(item) for item in value] if isinstance(value, list | tuple) else value


def _is_filler(value: Mapping[Any, Any], key: Any) -> bool:
    # the content of a message is null if the message only calls tools
    return value.get(key) is None and not (key == "content" and value.get("role") is not None)
