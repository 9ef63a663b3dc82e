"""What a text of metrics says."""

from __future__ import annotations

from prometheus_client.parser import text_string_to_metric_families


def parse(text: bytes) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    """Return every sample of a text."""
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text.decode())
        for sample in family.samples
    }
