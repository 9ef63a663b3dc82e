"""The frames of `feeder top`, drawn from figures. Needs rich."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from feeder.observe.humanize import duration, size
from feeder.observe.interval import Interval, QueuePart, WorkerPart
from feeder.observe.status.history import History, Point
from feeder.observe.verdict import Verdict
from feeder.service.ratelimited_log import plain

# Characters of a bar and of a curve: a feed's panel fits into 100 columns.
_BAR = 12
_LEVELS = "▁▂▃▄▅▆▇█"
_CURVE = 40
# A feed may have hundreds; those that were waited for most say what to do.
_MOST_WORKERS = 16
_TONES = {
    "trainer-bound": "green",
    "ended": "green",
    "failed": "bold red",
    "failing-fetch": "bold red",
    "stalled-queue": "bold red",
    "starting": "dim",
    "waiting": "dim",
    "stopped": "dim",
}


def make_frame(history: History, place: str, trouble: str) -> RenderableType:
    """All feeds as they were last read; `trouble` is why they could not be read again."""
    figures = history.latest
    assert figures is not None
    # Names come from another process: `plain` takes out what a terminal would obey.
    head = Text.assemble(("feeder top ", "bold"), place, "  ", (plain(figures.who), "dim"))
    parts: list[RenderableType] = [head]
    if trouble:
        parts.append(Text(f"{plain(trouble)}; trying again", style="bold red"))
    points, verdicts = history.points(), history.verdicts()
    for title, interval in history.intervals().items():
        parts.append(_feed(interval, verdicts[title], points[title]))
    return Group(*parts)


def _feed(interval: Interval, verdict: Verdict, points: list[Point]) -> Panel:
    feed = interval.after
    rates = (
        f"{interval.taken_per_s:.1f} batches/s, {size(interval.taken_bytes_per_s)}/s, trainer "
        f"waits {interval.starving:.0%}, buffer {feed.buffered_rows} of {feed.limit_rows} rows"
    )
    waits_s = max((queue.after.wait_p99_s for queue in interval.queues), default=0.0)
    rates += f"\n{_progress(interval)}99 of 100 waits took {duration(waits_s)} at most"
    said = Text.assemble(
        (verdict.kind, _TONES.get(verdict.kind, "bold yellow")), f"  {plain(verdict.why)}"
    )
    parts: list[RenderableType] = [said]
    if verdict.advice:
        parts.append(Text(f"→ {verdict.advice}", style="dim"))
    parts += [Text.assemble(rates, "  ", (_curve(points), "blue")), _queues(interval)]
    if interval.workers:
        parts.append(_workers(interval))
    if feed.executor is not None:
        one = feed.executor
        parts.append(
            f"{one.kind} {one.busy} of {one.processes} busy, {one.restarts} restarts, "
            f"{size(one.bytes)} shared"
        )
        if one.nodes:
            parts.append(plain(", ".join(f"{name}: {num}" for name, num in one.nodes)))
    if feed.store is not None:
        parts.append(_store(interval))
    title = Text.assemble((plain(feed.title), "bold"), f" ({feed.state})")
    return Panel(Group(*parts), title=title, title_align="left")


def _progress(interval: Interval) -> str:
    """How far it is in its epoch, and when that ends."""
    progress = interval.after.progress
    if progress is None:
        return ""
    of_all = f" of {progress.epochs}" if progress.epochs else ""
    told = f"epoch {progress.epoch + 1}{of_all}: batch {progress.batches}"
    if progress.length:
        told += f" of {progress.length} ({progress.batches / progress.length:.0%})"
        left = progress.length - progress.batches
        if left > 0 and interval.taken_per_s > 0:
            told += f", ends in about {duration(left / interval.taken_per_s)}"
    return f"{told}; "


def _store(interval: Interval) -> str:
    """What comes from object stores, and what is ahead."""
    store, hits, waits = interval.after.store, interval.of_store("hits"), interval.of_store("waits")
    assert store is not None
    return (
        f"store {size(interval.of_store('bytes') / interval.seconds)}/s in "
        f"{interval.of_store('requests') / interval.seconds:.3g} requests/s, {store.retries} "
        f"retries; {hits / max(1.0, hits + waits):.0%} of reads found their block; "
        f"{size(store.ahead)} ahead, blocks coming {store.coming}, wanted {store.wanted}"
    )


def _queues(interval: Interval) -> Table:
    table = _table("queue", "filled", "batches/s", "waits", "consumer")
    for queue in interval.queues:
        after = queue.after
        table.add_row(
            after.name,
            _bar(after.waiting, after.capacity),
            f"{queue.batches / interval.seconds:.1f}",
            f"{queue.wait:.0%}",
            Text(_reader(queue, served=interval.after.service is not None)),
        )
    return table


def _reader(queue: QueuePart, *, served: bool) -> str:
    consumer = queue.after.consumer
    if consumer is None:
        return "nobody" if served else "in process"
    plane = f", {consumer.plane}" if consumer.plane else ""
    return plain(f"{consumer.who}{plane}")


def _workers(interval: Interval) -> Table:
    """The workers that were waited for most; all of them where there are few."""
    table = _table("worker", "in the fetch function", "a call", "calls/s", "waited for", "errors")
    errors = {worker.worker: worker.errors for worker in interval.after.workers}
    shown = sorted(interval.workers, key=_weight)[:_MOST_WORKERS]
    for part in sorted(shown, key=lambda part: part.worker):
        share = part.fetch_s / interval.seconds
        table.add_row(
            str(part.worker),
            _bar(round(100 * min(1.0, share)), 100, "%"),
            duration(part.call_s) if part.fetch_s else "–",
            f"{part.calls / interval.seconds:.1f}",
            f"{min(1.0, part.wait_s / interval.seconds):.0%}",
            str(errors[part.worker]),
        )
    hidden = len(interval.workers) - len(shown)
    if hidden:
        table.caption = f"and {hidden} more that were waited for less"
    return table


def _weight(part: WorkerPart) -> tuple[float, float]:
    return -part.wait_s, -part.fetch_s


def _table(*names: str) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    for name in names:
        table.add_column(name, no_wrap=True)
    return table


def _bar(value: int, most: int, unit: str = "") -> Text:
    filled = round(_BAR * min(1.0, value / most)) if most else 0
    told = f" {value}{unit or (f'/{most}' if most else '')}"
    return Text.assemble(("█" * filled, "blue"), ("░" * (_BAR - filled), "dim"), told)


def _curve(points: list[Point]) -> str:
    """Batches a second over time, in one line."""
    rates = [point.batches for point in points[-_CURVE:]]
    most = max(rates, default=0.0) or 1.0
    return "".join(_LEVELS[min(7, int(8 * rate / most))] for rate in rates)
