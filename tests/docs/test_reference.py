"""The pages of reference name everything that there is, and nothing that there is not."""

from __future__ import annotations

import argparse
import inspect
import re
from collections.abc import Iterator

import pytest

import feeder
from conformance.served import reading, serving
from docs.pages import ROOT, blocks_of, script, section, table
from feeder import errors
from feeder.cli import COMMANDS, _module
from feeder.observe.metrics import METRICS, names
from feeder.observe.verdict import KINDS
from small import Pure, make

pytestmark = pytest.mark.process

DOCS = ROOT / "docs"


def headings(page: str) -> list[str]:
    return re.findall(r"^## (.+)$", (DOCS / page).read_text(), re.MULTILINE)


def test_every_error_has_its_section_with_cause_and_cure() -> None:
    assert sorted(headings("errors.md")) == sorted(errors.__all__)
    for name in errors.__all__:
        text = section(DOCS / "errors.md", name)
        assert "**Cure**: " in text, name
        assert name == "FeedError" or "**Cause**: " in text, name


def commands_with_words() -> Iterator[str]:
    """Every command, and every word that one of them takes first."""
    for name in COMMANDS:
        yield name
        parsers = argparse.ArgumentParser().add_subparsers()
        if name != "demo":
            _module(name).add_parser(parsers)
            for action in parsers.choices[name]._actions:
                if isinstance(action, argparse._SubParsersAction):
                    yield from (f"{name} {word}" for word in action.choices)


def test_every_command_has_its_section_with_its_help() -> None:
    assert sorted(headings("commands.md")) == [f"feeder {name}" for name in sorted(COMMANDS)]
    helped = {b.code.strip() for b in blocks_of(DOCS / "commands.md") if b.language == "sh"}
    wanted = {"feeder --help", *(f"feeder {name} --help" for name in commands_with_words())}
    assert wanted - helped == set()


def test_every_setting_is_told() -> None:
    """`scripts/docs settings` writes them anew."""
    page = (DOCS / "settings.md").read_text()
    assert script("write_settings").written(page) == page
    for function in (feeder.init_data_input_workers, feeder.serve, feeder.connect):
        told = [row[0] for row in table(section(DOCS / "settings.md", function.__name__))]
        assert told == [f"`{name}`" for name in inspect.signature(function).parameters]


def names_in(rows: list[list[str]]) -> set[str]:
    return {name for row in rows for name in re.findall(r"`([\w/]+)`", row[0])}


def test_every_statistic_is_told() -> None:
    text = section(DOCS / "watching.md", "In the program")
    of_feed, of_consumer = text.split("| `consumer.stats()`")
    found = {re.sub(r"/[0-9]+/", "/N/", name) for name in make(Pure())["train"].stats()}
    assert names_in(table(of_feed)) == found
    with serving(lambda: make(Pure())) as server, reading(server) as consumer:
        assert names_in(table(f"\n|{of_consumer}")) == set(consumer.stats())


def test_every_verdict_is_told() -> None:
    rows = table(section(DOCS / "watching.md", "The verdict"))
    assert {name for row in rows for name in re.findall(r"`([a-z-]+)`", row[0])} == set(KINDS)


def test_every_metric_is_told_with_its_labels() -> None:
    told = {row[0].strip("`"): row[1] for row in table(section(DOCS / "watching.md", "Metrics"))}
    assert set(told) == names()
    for metric in METRICS:
        assert told[metric.name] == ", ".join(metric.labels)


def test_every_source_is_named() -> None:
    text = (DOCS / "sources.md").read_text()
    assert [name for name in feeder.sources.__all__ if f"sources.{name}" not in text] == []


def test_every_alert_is_told() -> None:
    rules = (ROOT / "deploy/prometheus/rules.yml").read_text()
    told = [
        row[0].strip("`") for row in table(section(DOCS / "deploying.md", "Prometheus and Grafana"))
    ]
    assert told == re.findall(r"alert: (\w+)", rules)


def test_the_readme_lists_the_api() -> None:
    text = section(ROOT / "README.md", "The API")
    named = {name for row in table(text) for name in re.findall(r"`(?:feeder\.)?(\w+)", row[0])}
    plain = set(feeder.__all__) - set(errors.__all__)
    assert named == plain
    assert "docs/errors.md" in text
