"""Ready-made sources: passed to `init_data_input_workers` where a fetch function is.

Names are imported when they are first used. `caffe_lmdb` and `caffe2_lmdb` need the extra `lmdb`,
and whatever decodes image files the extra `images`.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from workers.sources import (
        IterableSource,
        OrderOptions,
        RecordError,
        Records,
        SampleInfo,
        Source,
        arrays,
        caffe2_lmdb,
        caffe_lmdb,
        image_folder,
        iterable,
        records,
        samples,
        tokens,
    )

__all__ = [
    "IterableSource",
    "OrderOptions",
    "RecordError",
    "Records",
    "SampleInfo",
    "Source",
    "arrays",
    "caffe2_lmdb",
    "caffe_lmdb",
    "image_folder",
    "iterable",
    "records",
    "samples",
    "tokens",
]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'feeder.sources' has no attribute {name!r}")
    value = getattr(importlib.import_module("workers.sources"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
