"""The metrics as OpenTelemetry asks for them: observable instruments of a provider of meters.

Needs the extra `opentelemetry`, which is imported when metrics are registered.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Protocol

import feeder
from feeder.errors import ConfigError, FeedError
from feeder.observe.figures import Figures
from feeder.observe.metrics import Series, all_series
from feeder.observe.status.history import History
from feeder.workers import forks
from feeder.workers.public import public

if TYPE_CHECKING:
    from opentelemetry.metrics import CallbackOptions, MeterProvider, Observation

_UNITS = {"_seconds": "s", "_bytes": "By"}
"""By the end of a name. Others have none: Prometheus would add the unit "1" to a name, as a
ratio."""


class HasFigures(Protocol):
    """A `Coordinator` or a `Server`."""

    def figures(self) -> Figures:
        """The figures of all its feeds; any thread may ask."""


class _Readings:
    """Reads the figures once for each collection. Its lock guards all fields, as each reader of a
    provider collects in a thread of its own.

    A collection asks for one metric after the other, and nothing says that it begins: a metric that
    asks again is of the next one. The feeds are not held: nobody might stop them otherwise.
    """

    def __init__(self, feeds: HasFigures) -> None:
        self._feeds: Callable[[], HasFigures | None] = weakref.ref(feeds)
        self._lock = threading.Lock()
        self._history = History()
        self._read: dict[str, Mapping[tuple[str, ...], float]] = {}
        """The metrics of the last reading that were not asked for yet."""
        forks.call_in_child(self.after_fork)

    def after_fork(self) -> None:
        """This is a forked child: the feeds are the parent's, and it tells of them."""
        self._feeds, self._lock, self._read = (lambda: None), threading.Lock(), {}

    def take(self, name: str) -> Mapping[tuple[str, ...], float]:
        """The values of a metric, by those of its labels; none if there are no figures."""
        with self._lock:
            if name not in self._read:
                self._read = self._next()
            return self._read.pop(name)

    def _next(self) -> dict[str, Mapping[tuple[str, ...], float]]:
        feeds = self._feeds()
        try:
            figures = None if feeds is None else feeds.figures()
        except FeedError:  # Closed, or its I/O thread does not answer.
            figures = None
        if figures is None:
            return {each.name: {} for each in _no_series()}
        self._history.add(figures)
        kinds = {title: verdict.kind for title, verdict in self._history.verdicts().items()}
        return {each.name: each.values for each in all_series(figures, kinds)}


@public("feeder")
def register_metrics(feeds: HasFigures, meter_provider: MeterProvider | None = None) -> None:
    """Give a coordinator's or a server's metrics to OpenTelemetry, as observable instruments.

    They have the names, labels and values of `/metrics`, but that the names of counters end without
    `_total`, which OpenTelemetry adds again where it exports to Prometheus. Once `feeds` is closed
    or forgotten, they have no values.

    Args:
        feeds: A `Coordinator` or a `Server`.
        meter_provider: Where they are registered; by default the provider of the process.

    Raises `ConfigError` if OpenTelemetry is not installed.
    """
    try:
        from opentelemetry import metrics
    except ImportError as error:
        raise ConfigError(
            "metrics for OpenTelemetry need its SDK: pip install 'feedworks[opentelemetry]'"
        ) from error

    readings = _Readings(feeds)

    def observing(series: Series) -> Callable[[CallbackOptions], Iterator[Observation]]:
        def observe(options: CallbackOptions) -> Iterator[Observation]:
            for labels, value in readings.take(series.name).items():
                yield metrics.Observation(value, dict(zip(series.labels, labels, strict=True)))

        return observe

    meter = metrics.get_meter("feeder", feeder.__version__, meter_provider)
    for series in _no_series():
        name = series.name.removesuffix("_total")
        unit = next((unit for end, unit in _UNITS.items() if name.endswith(end)), "")
        is_counter = series.kind == "counter"
        make = meter.create_observable_counter if is_counter else meter.create_observable_gauge
        make(name, [observing(series)], unit, series.help)


def _no_series() -> list[Series]:
    """Every metric, of no feeds."""
    return all_series(Figures(version=feeder.__version__, who="", at_s=0.0, feeds=()), {})
