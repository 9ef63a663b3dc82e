"""The metrics as Prometheus asks for them: a text of one moment.

Needs the extra `metrics`. The figures are collected for one exposition and registered nowhere: the
global registry of the process belongs to the user.
"""

from __future__ import annotations

from collections.abc import Iterator

from feeder.errors import ConfigError
from feeder.observe.figures import Figures
from feeder.observe.metrics import Series, all_series

try:
    from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
    from prometheus_client.metrics_core import Metric as Family
    from prometheus_client.registry import Collector
except ImportError as error:
    raise ConfigError(
        "metrics for Prometheus need prometheus-client: pip install 'feedworks[metrics]'"
    ) from error


class _Figures(Collector):
    """The metrics of one moment, for the one thread that exposes them."""

    def __init__(self, series: list[Series]) -> None:
        self._series = series

    def collect(self) -> Iterator[Family]:
        """Every metric, in the order of the table."""
        for each in self._series:
            make = CounterMetricFamily if each.kind == "counter" else GaugeMetricFamily
            family = make(each.name.removesuffix("_total"), each.help, labels=each.labels)
            for labels, value in each.values.items():
                family.add_metric(labels, value)
            yield family


def expose(figures: Figures, kinds: dict[str, str]) -> tuple[str, bytes]:
    """Content type and text; `kinds` is the kind of each feed's verdict by its title."""
    return CONTENT_TYPE_LATEST, generate_latest(_Figures(all_series(figures, kinds)))
