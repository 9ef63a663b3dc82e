"""A setting is written once: what a signature and its docstring say is checked, read and shown."""

from __future__ import annotations

import argparse
import functools
import inspect
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Annotated, Any, Literal

import numpy as np
import pytest
from msgspec import Meta

import feeder
from docs.pages import ROOT, script
from feeder.cli import flags
from feeder.config_file import keys
from feeder.config_file.build import locating
from feeder.errors import ConfigError
from feeder.settings import PositiveInt, Seconds, check, parameters
from feedfiles import FEED, read

LINE = """
    burst: Batches that leave at a time (default: 8). Of many, each waits longer. See
        docs/tuning.md#buffers."""


def with_a_burst(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function as it is once its signature and its docstring have one parameter more."""

    @functools.wraps(function)
    def wider(*arguments: Any, burst: int = 8, **named: Any) -> Any:
        raise AssertionError("only its signature is looked at")

    kind = Annotated[int, Meta(ge=1, le=64)]
    signature = inspect.signature(function)
    one = inspect.Parameter("burst", inspect.Parameter.KEYWORD_ONLY, default=8, annotation=kind)
    named = [*signature.parameters.values(), one]
    wider.__signature__ = signature.replace(parameters=named)  # type: ignore[attr-defined]
    wider.__annotations__ = {**function.__annotations__, "burst": kind}
    doc = inspect.cleandoc(function.__doc__ or "")
    wider.__doc__ = doc.replace("\n\nReturns:", f"{LINE}\n\nReturns:", 1)
    return wider


@pytest.fixture
def wider(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Both front doors have one parameter more; nothing else is changed."""
    for name in ("serve", "init_data_input_workers"):
        function = with_a_burst(getattr(feeder, name))
        monkeypatch.setattr(keys, name, function)
        monkeypatch.setattr(feeder, name, function, raising=False)
    for table in (keys.server_keys, keys.feed_keys):
        table.cache_clear()
    yield
    for table in (keys.server_keys, keys.feed_keys):
        table.cache_clear()


FRONT_DOORS = ("serve", "init_data_input_workers")


@pytest.mark.usefixtures("wider")
@pytest.mark.parametrize("name", FRONT_DOORS)
def test_one_parameter_more_is_checked(name: str) -> None:
    door = getattr(feeder, name)
    assert check(door, {"burst": np.int32(64)}) == {"burst": 64}
    for value, told in (("8", ">= 1"), (True, ">= 1"), (8.0, ">= 1"), (0, ">= 1"), (65, "<= 64")):
        with pytest.raises(ConfigError) as caught:
            check(door, {"burst": value})
        assert str(caught.value) == f"burst is {value!r}, expected a whole number {told}"


@pytest.mark.usefixtures("wider")
def test_one_parameter_more_is_a_key_and_a_variable() -> None:
    text = "[server]\nburst = 9\n[feeds.train]\nburst = 65\n" + FEED.replace("[feeds.train]\n", "")
    settings = read(text)
    assert settings.server["burst"] == (9, "feed.toml:2")
    assert settings.feeds["train"]["burst"] == (65, "feed.toml:4")
    assert read(FEED).server["burst"] == read(FEED).feeds["train"]["burst"] == (8, "default")
    with locating(settings.feeds["train"]), pytest.raises(ConfigError) as caught:
        check(feeder.init_data_input_workers, {"burst": settings.feeds["train"]["burst"].value})
    assert str(caught.value) == "burst is 65, expected a whole number <= 64"
    for variable, table in (("SERVER", "server"), ("FEEDS_TRAIN", "feeds.train")):
        named = f"FEEDER_{variable}_BURST"
        given = read(FEED, {named: "7"})
        found = given.server if table == "server" else given.feeds["train"]
        assert found["burst"] == (7, named)
        with pytest.raises(ConfigError, match=f"^{named}: burst is 'x', expected a whole number$"):
            read(FEED, {named: "x"})
        with pytest.raises(ConfigError, match=r"burst is 'x', expected a whole number$"):
            read(f"[{table}]\nburst = 'x'\n")


@pytest.mark.usefixtures("wider")
def test_one_parameter_more_is_a_flag(capsys: pytest.CaptureFixture[str]) -> None:
    parser = argparse.ArgumentParser(prog="feeder serve")
    flags.add_settings(parser)
    assert flags.read(parser.parse_args(["--burst=9"]), None).server["burst"] == (9, "--burst")
    assert flags.read(parser.parse_args([]), None).server["burst"] == (8, "default")
    with pytest.raises(SystemExit):
        parser.parse_args(["--burst=65"])
    assert "argument --burst: '65' is not a whole number from 1 to 64" in capsys.readouterr().err
    told = " ".join(parser.format_help().split())
    assert told.endswith("--burst BURST batches that leave at a time (default: 8)")


@pytest.mark.usefixtures("wider")
def test_one_parameter_more_is_on_the_page() -> None:
    before = (ROOT / "docs/settings.md").read_text()
    after = script("write_settings").written(before)
    row = (
        "| `burst` | `8` | Batches that leave at a time (default: 8). Of many, each waits longer. "
        "See [tuning](tuning.md#buffers). |\n"
    )
    assert after.count(row) == len(FRONT_DOORS)
    assert after.replace(row, "") == before


# ---- the kinds of settings


def anything(
    count: PositiveInt | None = None,
    seconds: Seconds = 1.0,
    ratio: Annotated[float, Meta(ge=0, lt=1, description="a number from 0 to 1")] = 0.5,
    name: Annotated[str, Meta(min_length=2)] = "ab",
    mode: Annotated[str, Literal["a", "b"]] = "a",
    kind: Literal["a", "b"] = "a",
    is_on: bool = False,
    made: Callable[[], Any] | None = None,
    others: int | Sequence[int] = (),
    found: Any = None,
) -> None:
    """A function of every kind of parameter."""


@pytest.mark.parametrize(
    ("name", "value", "told"),
    [
        ("count", 0, "count is 0, expected a whole number >= 1"),
        ("seconds", 0, "seconds is 0 s, expected more than 0, at most 1e9"),
        ("seconds", None, "seconds is None s, expected more than 0, at most 1e9"),
        ("seconds", float("nan"), "seconds is nan s, expected more than 0, at most 1e9"),
        ("ratio", 1, "ratio is 1, expected a number from 0 to 1"),
        ("name", "a", "name is 'a', expected a string of length >= 2"),
        ("name", 5, "name is 5, expected a string of length >= 2"),
        ("mode", "c", "mode is 'c', expected one of ('a', 'b')"),
        ("mode", ["a"], "mode is ['a'], expected one of ('a', 'b')"),
        ("kind", "c", "kind is 'c', expected one of ('a', 'b')"),
        ("is_on", 1, "is_on is 1, expected True or False"),
        ("made", 3, "made is 3, expected a function, or None"),
    ],
)
def test_what_a_type_and_its_bounds_refuse_is_told(name: str, value: Any, told: str) -> None:
    with pytest.raises(ConfigError, match=f"^{re.escape(told)}$"):
        check(anything, {name: value})


def test_what_they_take_comes_back_as_pythons_own_numbers() -> None:
    given = {
        "count": np.int64(3), "seconds": 2, "ratio": np.float32(0.5), "name": "abc", "mode": "b",
        "kind": "b", "is_on": True, "made": len, "others": "what takes it checks it", "found": [],
    }  # fmt: skip
    checked = check(anything, given)
    assert checked == given
    assert [type(checked[name]) for name in ("count", "seconds", "ratio")] == [int, float, float]
    assert check(anything, {"count": None, "made": None}) == {"count": None, "made": None}


def test_each_setting_has_a_line() -> None:
    for function in (feeder.init_data_input_workers, feeder.serve, feeder.connect):
        assert [one.name for one in parameters(function).values() if not one.line] == []
    assert [name for name, key in keys.checkpoint_keys().items() if not key.line] == []


def test_no_text_lets_other_hosts_in() -> None:
    with pytest.raises(ConfigError, match=r"^insecure is 'no', expected True or False$"):
        feeder.serve(feeder.Coordinator(), "tcp://0.0.0.0:0", insecure="no")  # type: ignore[arg-type]
