"""Measures how well orders shuffle, and draws figures/shuffle.svg: the table and the picture of
far-data.md. Run it as `python docs/draw_shuffle.py`; a test compares both with what is made anew.

Of 65,536 records in 64 shards it looks at one epoch in batches of 256: at the correlation between a
record's number and that of the record after it, which is 1 in order and 0 by chance, and at how
many shards a batch has records of.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from feeder import Call, sources

PICTURE = Path(__file__).with_name("figures") / "shuffle.svg"
SIZE, SHARD, BATCH, PARTS, SHOWN = 65_536, 1024, 256, 8, 420
_SIDE, _GAP = 150, 16


def part(first: int, size: int) -> sources.Source:
    """Records that are their own numbers, from one on."""
    return sources.arrays({"x": np.arange(first, first + size)})


def mixed(window: int) -> sources.Source:
    """Parts of the records that follow one another, shuffled in windows and mixed."""
    size = SIZE // PARTS
    return sources.mix({
        str(i): (part(i * size, size).shuffle(window=window), 1.0) for i in range(PARTS)
    })  # fmt: skip


ORDERS: dict[str, sources.Source] = {
    "in order": part(0, SIZE),
    "`shuffle(window=1024)`": part(0, SIZE).shuffle(window=1024),
    "`shuffle(window=8192)`": part(0, SIZE).shuffle(window=8192),
    "8 parts of `shuffle(window=1024)`, mixed": mixed(1024),
    "`shuffle()`": part(0, SIZE).shuffle(),
}
WINDOWS = ["1", "1,024", "8,192", "8 x 1,024", "all"]
"""The records that are under way together."""


def epoch(source: sources.Source) -> NDArray[Any]:
    """The numbers of the records, in their order."""
    calls = (Call(i, 0, 0, BATCH, 7) for i in range(SIZE // BATCH))
    made: list[Any] = [source(call) for call in calls]
    return np.concatenate([one["x"] for one in made])


def figures(order: NDArray[Any]) -> tuple[float, float]:
    """The correlation of neighbours, and the shards of a batch on the average."""
    correlation = float(np.corrcoef(order[:-1], order[1:])[0, 1])
    batches = (order // SHARD).reshape(-1, BATCH)
    return correlation, float(np.mean([len(set(batch)) for batch in batches.tolist()]))


def table(orders: dict[str, NDArray[Any]]) -> list[str]:
    """The rows of the page's table."""
    rows = []
    for (name, order), window in zip(orders.items(), WINDOWS, strict=True):
        correlation, shards = figures(order)
        rows.append(f"| {name} | {window} | {abs(correlation):.2f} | {shards:.0f} |")
    return rows


def drawn(orders: dict[str, NDArray[Any]]) -> str:
    """The picture: of each order some records, by their place in the epoch and their number."""
    width = len(orders) * (_SIDE + _GAP) + _GAP
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {_SIDE + 44}" '
        'font-family="DejaVu Sans, sans-serif" font-size="9" fill="#22252b">',
        f'<rect width="{width}" height="{_SIDE + 44}" fill="#ffffff"/>',
    ]
    for i, (name, order) in enumerate(orders.items()):
        left = _GAP + i * (_SIDE + _GAP)
        places = np.arange(0, SIZE, SIZE // SHOWN)
        dots = "".join(
            f"M{left + _SIDE * at / SIZE:.1f} {24 + _SIDE * (1 - order[at] / SIZE):.1f}h0"
            for at in places.tolist()
        )
        title = name.replace("`", "")
        first, _, second = title.partition(" of ") if len(title) > 24 else (title, "", "")
        parts.append(f'<text x="{left}" y="{10 if second else 18}">{first}</text>')
        if second:
            parts.append(f'<text x="{left}" y="20">{second}</text>')
        parts.append(
            f'<rect x="{left}" y="24" width="{_SIDE}" height="{_SIDE}" fill="none" '
            f'stroke="#d5d7dc"/><path d="{dots}" stroke="#1f5fa8" stroke-width="2" '
            'stroke-linecap="round"/>'
        )
    parts.append(
        f'<text x="{_GAP}" y="{_SIDE + 38}" fill="#6d727c">'
        "to the right: the place in the epoch; upwards: the number of the record</text></svg>"
    )
    return "\n".join(parts) + "\n"


if __name__ == "__main__":
    measured = {name: epoch(source) for name, source in ORDERS.items()}
    PICTURE.write_text(drawn(measured))
    print("\n".join(table(measured)))
