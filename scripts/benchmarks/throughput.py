"""Batches per second from another process, of three sizes and over each transport."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from children import bounded
from contenders import Contender, copyto, handover, timed
from factories import LOADS
from harness import Measures, Settings, Spread, interleave
from report import Goal, Report, rate_cells, spread
from served import by_hand, data_loader, has_torch, one_way, ping_pong, served

COPYTO = "copyto"
SHARED = "feeder, shared memory"
SEVENS = f"{SHARED}, chunks of 7"
QUEUE = "queue.Queue(100) in one process"
TORCH = "DataLoader, 2 workers"
COPYTO_BYTES_PER_S = 20e9
"""What copyto did where the rate of 1 MB batches was asked for."""
PING_PONG = "a byte over two pipes and back"
PIPE = "multiprocessing.Pipe, one way"
SMALL_ASKED = {8: (PING_PONG, 1.0), 64: (PIPE, 0.7)}
SMALL_ASKED_PER_S = {8: 22_000, 64: 80_000}
CHECKSUMS_ASKED = {"sampled": 5, "full": 35}
ONCE = "checksum off, each batch read once"


def images_shared(settings: Settings) -> Report:
    """19.8 MB through shared memory, beside the other ways from process to process."""
    contenders = {
        SHARED: served("images", plane="shared"),
        SEVENS: served("images-7", plane="shared"),
        "ZeroMQ ipc": by_hand("images", "ipc"),
    }
    asked = {COPYTO: 0.85, "ZeroMQ ipc": 3.0}
    if has_torch():
        contenders[TORCH] = data_loader("images")
        asked[TORCH] = 5.0
    rates = _race("images", contenders, settings)
    return _report(
        "images-shared", "images", rates,
        goals=[_ratio("images-shared", rates, SHARED, other, asked[other]) for other in asked],
        notes=() if has_torch() else ("PyTorch is not installed: no DataLoader beside it",),
    )  # fmt: skip


def images_frames(settings: Settings) -> Report:
    """19.8 MB in frames, with the checksums that frames have and without, beside ZeroMQ."""
    contenders = {}
    for scheme in ("tcp", "ipc"):
        contenders[f"feeder, {scheme}"] = served("images", scheme, plane="frames")
        contenders[f"feeder, {scheme}, unchecked"] = served(
            "images", scheme, plane="frames", checksum="off"
        )
        contenders[f"ZeroMQ {scheme}"] = by_hand("images", scheme)
    rates = _race("images", contenders, settings)
    names = ("feeder, tcp", "feeder, tcp, unchecked")
    goals = [_ratio("images-frames", rates, name, "ZeroMQ tcp", 0.9) for name in names]
    return _report("images-frames", "images", rates, goals=goals)


def vectors_shared(settings: Settings) -> Report:
    """1 MB batches through shared memory."""
    rates = _race("vectors", {SHARED: served("vectors", plane="shared")}, settings)
    ratio = rates[SHARED].per(rates[COPYTO])
    there = ratio.times(COPYTO_BYTES_PER_S / LOADS["vectors"].batch_bytes)
    note = f"where copyto does {COPYTO_BYTES_PER_S / 1e9:.0f} GB/s that is {spread(there, '/s')}"
    goal = _ratio("vectors-shared", rates, SHARED, COPYTO, 0.35)
    return _report("vectors-shared", "vectors", rates, goals=[goal], notes=(note,))


def small_shared(settings: Settings) -> Report:
    """8 KB batches with little and with much credit, from chunks of one batch and of 64.

    A chunk of one batch costs a call and a merge for each batch; of large chunks what is left is
    the service. With little credit a batch waits for word from the consumer as a ping-pong does,
    with much it need not, as in a pipe. A queue tells how fast the machine is.
    """
    contenders: dict[str, Contender] = {PING_PONG: ping_pong, PIPE: one_way("small")}
    asked, against = {}, {}
    for name in ("small", "small-4096"):
        for credit, per_s in SMALL_ASKED_PER_S.items():
            title = f"credit {credit}, chunks of {LOADS[name].chunk_rows}"
            contenders[title] = served(name, plane="shared", credit=credit)
            asked[title] = per_s
            against[title] = SMALL_ASKED[credit]
    rates = _race("small", {**contenders, QUEUE: handover}, settings)
    goals = [
        Goal(what=f"small-shared: {title}", asked=asked[title], measured=rates[title], unit="/s")
        for title in asked
    ]
    goals += [
        _ratio("small-shared", rates, title, other, least)
        for title, (other, least) in against.items()
    ]
    return _report("small-shared", "small", rates, goals=goals)


def checksums(settings: Settings) -> Report:
    """What checksums cost at 19.8 MB through shared memory, to a trainer that looks at one element
    of each batch; and what one reading of all of each batch costs, which the consumer has to do."""
    names = {mode: f"checksum {mode}" for mode in ("off", *CHECKSUMS_ASKED)}
    contenders = {
        name: served("images", plane="shared", checksum=mode) for mode, name in names.items()
    }
    contenders[ONCE] = served("images", plane="shared", checksum="off", reads=True)
    rates = _race("images", contenders, settings)
    goals = [
        Goal(what=f"checksums: {mode}, cost in throughput", asked=asked, unit="%", at_most=True,
             measured=_cost(rates[names[mode]], rates[names["off"]]))
        for mode, asked in CHECKSUMS_ASKED.items()
    ]  # fmt: skip
    once = _cost(rates[ONCE], rates[names["off"]])
    note = f"{ONCE}: {spread(once, '%')} of the throughput"
    return _report("checksums", "images", rates, goals=goals, notes=(note,))


def _cost(rate: Spread, other: Spread) -> Spread:
    return Spread(samples=tuple(100 * (1 - ratio) for ratio in rate.per(other).samples))


def _race(name: str, contenders: Mapping[str, Contender], settings: Settings) -> dict[str, Spread]:
    """All contenders and copyto in turns, each bounded in time."""
    raced = {**contenders, COPYTO: copyto(LOADS[name])}
    measures: list[Callable[[], Measures]] = [
        bounded()(timed(title, contender, settings)) for title, contender in raced.items()
    ]
    return interleave(measures, settings.repetitions)


def _ratio(case: str, rates: Mapping[str, Spread], name: str, other: str, asked: float) -> Goal:
    measured = rates[name].per(rates[other])
    return Goal(what=f"{case}: {name} against {other}", asked=asked, measured=measured, unit="×")


def _report(
    case: str, name: str, rates: dict[str, Spread], goals: Sequence[Goal], notes: Sequence[str] = ()
) -> Report:
    load = LOADS[name]
    return Report(
        case=case,
        title=f"batches of {load.name} from another process",
        head=("contender", "batches/s", "GB/s", "of copyto"),
        rows=tuple(
            (title, *rate_cells(rate, rates[COPYTO], load.batch_bytes))
            for title, rate in rates.items()
        ),
        measures=rates,
        goals=tuple(goals),
        notes=tuple(notes),
    )
