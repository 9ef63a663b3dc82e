"""Draws docs/figures/map.svg: the wings with their modules, and the way of a row through them.

The modules are those of the tree. Which files the row goes through is written here, and
`tests/docs/test_design.py` sees that it is of the modules that there are.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape
from pathlib import Path

ROOT = Path(__file__).parents[1]
MAP = ROOT / "docs/figures/map.svg"

MADE = [
    "workers/fetch/tickets.py",
    "workers/fetch/queue.py",
    "workers/fetch/fetcher.py",
    "workers/fetch/calls.py",
    "workers/stream/merge.py",
    "workers/stream/chunks.py",
    "workers/stream/position.py",
    "workers/stream/assembler.py",
    "workers/stream/copying.py",
    "workers/stream/batch.py",
    "workers/enqueuer.py",
]
"""The files from the fetch function to a batch, in this order."""

IN_PROCESS = [
    *MADE,
    "feeder/devices/slots.py",
    "feeder/devices/host.py",
    "feeder/waking.py",
    "feeder/feeds/stream.py",
    "feeder/feeds/device_feed.py",
]
"""The way of a row in process: with the files that decide which call is next, and those that hand
over. Counters, clocks, settings and what is done once are no part of it."""

SERVED = [
    *MADE,
    "feeder/service/memory/arena.py",
    "feeder/service/memory/memfd.py",
    "feeder/service/server/outbox.py",
    "feeder/service/server/group.py",
    "feeder/service/server/delivery.py",
    "feeder/service/server/io_loop.py",
    "feeder/service/protocol/batches.py",
    "feeder/service/protocol/coding.py",
    "feeder/service/net/connection.py",
    "feeder/waking.py",
    "feeder/service/client/io_loop.py",
    "feeder/service/client/machine.py",
    "feeder/service/client/remote.py",
    "feeder/service/client/lease.py",
    "feeder/service/memory/mapping.py",
    "feeder/service/client/inbox.py",
    "feeder/devices/host.py",
    "feeder/service/client/consumer.py",
]
"""The way of a row over shared memory, from the server's fetch function to the trainer."""

_MADE_BEFORE = (
    "rota ledger dispatch pace lead idle silence channel fetcher calls merge runs chunks position "
    "straddler assembler copying batch enqueuer"
)
IN_PROCESS_BEFORE = f"{_MADE_BEFORE} slots host bell stream devicefeed".split()
SERVED_BEFORE = (
    f"{_MADE_BEFORE} arena pool memfd outbox feeds desk delivery groups lease serving batches "
    "checks coding waker reception wire receiver conversation reading plane remote mapping host "
    "bell consumer"
).split()
"""The same ways through the files before they were laid out by concept, at commit 29c5bb1."""

WINGS = [
    ("workers: the engine", ["workers", "workers/fetch", "workers/stream"]),
    ("sources", [f"workers/sources{r}" for r in ("", "/steps", "/orders", "/stores", "/far")]),
    ("feeds", ["feeder", "feeder/feeds", "feeder/state"]),
    ("executors", ["feeder/executors"]),
    ("devices", ["feeder/devices", "feeder/devices/cuda"]),
    ("service: server", ["feeder/service", "feeder/service/server"]),
    ("service: client", ["feeder/service/client"]),
    ("service: below both", [f"feeder/service/{room}" for room in ("protocol", "memory", "net")]),
    ("checkpoints and jobs", ["feeder/checkpoint", "feeder/job", "feeder/job/checkpoints"]),
    (
        "around",
        [
            "feeder/observe",
            "feeder/observe/status",
            "feeder/config_file",
            "feeder/cli",
            "feeder/adapters",
            "feeder/adapters/torch",
        ],
    ),
]
"""The boxes of the drawing, with their folders."""

_WIDTH, _LINE, _GAP, _COLUMNS, _LINE_LETTERS = 268, 15, 14, 4, 130
_INK, _PALE, _ROW, _SERVED = "#37474f", "#90a4ae", "#c62828", "#1565c0"


def modules(folder: str) -> list[str]:
    """The modules of a folder, without those below it."""
    return sorted(
        path.relative_to(ROOT).as_posix()
        for path in (ROOT / folder).glob("*.py")
        if not path.name.startswith("__")
    )


def _text(x: float, y: float, text: str, fill: str = _INK, more: str = "") -> str:
    return f'<text x="{x:g}" y="{y:g}" fill="{fill}"{more}>{escape(text)}</text>'


def _module(x: float, y: float, path: str) -> Iterator[str]:
    """A module's name, with its numbers on both ways."""
    ways = ((IN_PROCESS, _ROW), (SERVED, _SERVED))
    on_way = any(path in way for way, _ in ways)
    bold = ' font-weight="bold"' if on_way else ""
    yield _text(x + 44, y, Path(path).stem, _INK if on_way else _PALE, bold)
    for i, (way, colour) in enumerate(ways):
        if path in way:
            at = x + 8 + 18 * i
            yield _text(at, y, f"{way.index(path) + 1}", colour, ' font-size="10"')


def _box(x: float, y: float, title: str, folders: Sequence[str]) -> tuple[list[str], float]:
    parts, top = [_text(x + 8, y + 18, title, _INK, ' font-size="14" font-weight="bold"')], y
    y += 26
    for folder in folders:
        names = modules(folder)
        if names:
            y += _LINE
            parts.append(_text(x + 8, y, f"{folder}/", _PALE, ' font-style="italic"'))
        for name in names:
            y += _LINE
            parts += _module(x, y, name)
    height = y + 10 - top
    frame = (
        f'<rect x="{x:g}" y="{top:g}" width="{_WIDTH}" height="{height:g}" rx="6" fill="#ffffff" '
        f'stroke="{_PALE}"/>'
    )
    return [frame, *parts], height


def _chain(y: float, title: str, names: Sequence[str], colour: str) -> tuple[list[str], float]:
    """A way as a line of names, or more of them."""
    lines, line = [], ""
    for i, name in enumerate(names, 1):
        item = f"{i} {name}"
        if len(line) + len(item) > _LINE_LETTERS:
            lines.append(line)
            line = ""
        line += item if not line else f" → {item}"
    parts = [_text(_GAP, y, title, colour, ' font-weight="bold"')]
    parts += [_text(_GAP + 190, y + _LINE * i, text, colour)
              for i, text in enumerate([*lines, line])]  # fmt: skip
    return parts, y + _LINE * (len(lines) + 1) + 6


def drawing() -> str:
    """The map as SVG."""
    parts, y = [], 50.0
    for title, names, colour in (
        ("in process, before", IN_PROCESS_BEFORE, _PALE),
        ("in process", [Path(path).stem for path in IN_PROCESS], _ROW),
        ("served, before", SERVED_BEFORE, _PALE),
        ("served", [Path(path).stem for path in SERVED], _SERVED),
    ):
        chain, y = _chain(y, f"{title}: {len(names)}", names, colour)
        parts += chain
    bottoms = [y] * _COLUMNS
    for title, folders in WINGS:
        column = bottoms.index(min(bottoms))
        x = _GAP + column * (_WIDTH + _GAP)
        box, height = _box(x, bottoms[column], title, folders)
        parts += box
        bottoms[column] += height + _GAP
    width, height = _GAP + _COLUMNS * (_WIDTH + _GAP), max(bottoms)
    head = [
        '<svg xmlns="http://www.w3.org/2000/svg" font-family="sans-serif" font-size="12" '
        f'viewBox="0 0 {width} {height:g}">',
        f'<rect width="{width}" height="{height:g}" fill="#fafafa"/>',
        _text(_GAP, 24, "The way of a row from the fetch function to the user, file by file", _INK,
              ' font-size="16" font-weight="bold"'),
    ]  # fmt: skip
    return "\n".join([*head, *parts, "</svg>", ""])


if __name__ == "__main__":
    MAP.write_text(drawing(), encoding="utf-8")
