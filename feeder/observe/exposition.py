"""Figures in the form that Prometheus reads. Needs the extra `metrics`.

A registry of our own for each time, so that nothing is left in the global one of the process, which
belongs to the user.
"""

from __future__ import annotations

from collections.abc import Iterator

from feeder.errors import ConfigError
from feeder.observe.figures import Figures
from feeder.observe.prometheus import BUILD, METRICS, VERDICT, samples, verdict_samples

try:
    from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
    from prometheus_client.metrics_core import Metric as Family
    from prometheus_client.registry import Collector
except ImportError as error:
    raise ConfigError(
        "metrics for Prometheus need prometheus-client: pip install 'feedworks[metrics]'"
    ) from error


class _Figures(Collector):
    """The figures of one moment."""

    def __init__(self, figures: Figures, kinds: dict[str, str]) -> None:
        self._figures = figures
        self._kinds = kinds

    def collect(self) -> Iterator[Family]:
        """Every metric, in the order of the table."""
        build = GaugeMetricFamily(BUILD, "The version of feeder.", labels=("version",))
        build.add_metric((self._figures.version,), 1.0)
        yield build
        verdict = GaugeMetricFamily(
            VERDICT, "1 for what holds the feed up.", labels=("feed", "kind")
        )
        for labels, value in verdict_samples(self._kinds).items():
            verdict.add_metric(labels, value)
        yield verdict
        for metric in METRICS:
            make = CounterMetricFamily if metric.kind == "counter" else GaugeMetricFamily
            family = make(metric.name.removesuffix("_total"), metric.help, labels=metric.labels)
            for labels, value in samples(metric, self._figures).items():
                family.add_metric(labels, value)
            yield family


def expose(figures: Figures, kinds: dict[str, str]) -> tuple[str, bytes]:
    """Content type and text; `kinds` is the kind of each feed's verdict by its title."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Figures(figures, kinds))
    return CONTENT_TYPE_LATEST, generate_latest(registry)
