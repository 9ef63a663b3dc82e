"""A coordinator from settings, and from an error back to the setting that it is about."""

from __future__ import annotations

import contextlib
import inspect
import re
from collections.abc import Iterator, Mapping
from difflib import get_close_matches
from typing import Any

from feeder import sources
from feeder.api import init_data_input_workers
from feeder.checkpoint.policy import Checkpointing
from feeder.config_file.keys import checkpointing, expected, feed_keys, unknown
from feeder.config_file.objects import load_setting, told
from feeder.config_file.settings import DEFAULT, OPTIONS, Settings, Table
from feeder.errors import ConfigError
from feeder.feeds.coordinator import Coordinator

_OBJECTS = frozenset({"collate", "dataset", "factory", "fn", "transform"})
"""Parameters of sources that take an object of Python; in a file it is named as MODULE:ATTR."""


def build_coordinator(settings: Settings) -> Coordinator:
    """A coordinator with every feed of the settings, not started.

    Raises `ConfigError`, with the place of the setting that is wrong in front.
    """
    coordinator = Coordinator()
    for name, table in settings.feeds.items():
        with locating(table, settings.places[name]):
            _add(coordinator, name, table)
    return coordinator


def build_checkpointing(table: Table) -> Checkpointing | None:
    """Where a server stores what was used; None where it does not. Raises `ConfigError`."""
    values = {key: setting.value for key, setting in table.items()}
    with locating(table):
        if values["url"] is None:
            _check_unstored(table)
        return checkpointing(**values)


def _check_unstored(table: Table) -> None:
    for key in ("every_s", "keep"):
        if table[key].origin != DEFAULT:
            raise ConfigError(f"{key} is {table[key].value!r}, and url does not say where to store")
    if table["resume"].value == "latest":
        raise ConfigError(
            "resume is 'latest', and nothing says of which checkpoints: give url, or "
            "--checkpoint-dir"
        )


def _add(coordinator: Coordinator, name: str, table: Table) -> None:
    for key in feed_keys().values():
        if key.name not in table and key.name != "options":
            raise ConfigError(f"{key.name} is missing, expected {expected(key)}")
    values = {key: setting.value for key, setting in table.items() if not key.startswith(OPTIONS)}
    fetch, source = values.pop("fetch"), values.pop("source")
    if (init_fun := values["init_fun"]) is not None:
        values["init_fun"] = load_setting(
            "init_fun", init_fun, "a function init_fun(feed, coordinator)"
        )
    if (loggers := values["external_loggers"]) is not None:
        values["external_loggers"] = [
            load_setting("external_loggers", text, "an object with log(dict)") for text in loggers
        ]
    values["fetch_fun"] = _fetch(fetch, source, table)
    init_data_input_workers(**values, input_source_name=name, coordinator=coordinator)
    # A server makes its feeds anew from the file whenever one goes back: a function of the file
    # that cannot be put back would then stand in the middle of its data.
    stream = coordinator[name].streams[0].config.stream
    if fetch is not None and not (stream.pure or stream.seekable):
        raise ConfigError(
            f"fetch is {fetch!r}, which cannot be put back: make it fetch(call), give it "
            "cursor(worker_id) and seek(worker_id, cursor), or name what makes a new one with "
            "source = 'MODULE:ATTR'"
        )


def _fetch(fetch: str | None, source: str | None, table: Table) -> Any:
    """The fetch function that a feed's settings name, or that its source makes."""
    options = {
        key.removeprefix(OPTIONS): setting.value
        for key, setting in table.items()
        if key.startswith(OPTIONS)
    }
    if fetch is not None and source is not None:
        raise ConfigError(f"source is {source!r} and fetch is {fetch!r}: give one of them")
    if source is not None:
        return _make_source(source, options)
    if fetch is None:
        raise ConfigError("neither fetch nor source is given: name a function, MODULE:ATTR")
    if options:
        raise ConfigError(
            f"{next(iter(options))} is an option of a source, and fetch is {fetch!r}, which takes "
            "none: name what makes it with source = 'MODULE:ATTR'"
        )
    return load_setting("fetch", fetch, "a fetch function")


def _make_source(source: str, options: Mapping[str, Any]) -> Any:
    """Call what makes a source: one of `feeder.sources`, or a function MODULE:ATTR."""
    makers = [name for name in sources.__all__ if name.islower()]
    if ":" in source:
        maker = load_setting("source", source, "a function that makes a fetch function")
    elif source in makers:
        maker = getattr(sources, source)
    else:
        raise ConfigError(f"{unknown('source', source, makers)}, or MODULE:ATTR")
    given = {
        name: load_setting(name, value, f"an object for {name}")
        if name in _OBJECTS and isinstance(value, str)
        else value
        for name, value in options.items()
    }
    try:
        # Bound first: a TypeError from inside the user's own function is not about its arguments.
        bound = _bind(maker, given)
    except TypeError as error:
        raise ConfigError(f"source {source!r}: {error}") from error
    except ConfigError:
        raise
    except ValueError as error:
        raise ConfigError(
            f"source is {source!r}, whose parameters are not known: {error}"
        ) from error
    try:
        return maker(*bound.args, **bound.kwargs)
    except ConfigError:
        raise
    except Exception as error:  # whatever a user's own function does
        raise ConfigError(f"source {source!r} raised {told(error)}") from error


def _bind(maker: Any, options: Mapping[str, Any]) -> inspect.BoundArguments:
    """Options as arguments; those of `*columns` are a list, or one value. Raises TypeError and
    `ConfigError`."""
    signature = inspect.signature(maker)
    given, spread = dict(options), []
    for name, parameter in signature.parameters.items():
        if parameter.kind is parameter.VAR_POSITIONAL and name in given:
            value = given.pop(name)
            spread = value if isinstance(value, list) else [value]
    try:
        return signature.bind(*spread, **given)
    except TypeError:
        _check_names(signature, given)
        raise


def _check_names(signature: inspect.Signature, given: Mapping[str, Any]) -> None:
    """Raise `ConfigError` for an option that is none; where any may be, for one that is nearly."""
    parameters = signature.parameters.values()
    known = [one.name for one in parameters if one.kind is not one.VAR_KEYWORD]
    takes_any = len(known) < len(parameters)
    for name in given:
        if name not in known and (not takes_any or get_close_matches(name, known)):
            raise ConfigError(unknown("option", name, known))


@contextlib.contextmanager
def locating(table: Table, otherwise: str = "") -> Iterator[None]:
    """Put the place of the setting that a ConfigError is about in front of its text.

    Errors name their setting first (`batch_size is 0, ...`), so the text finds it: the code that
    checks settings need not know of files.
    """
    try:
        yield
    except ConfigError as error:
        place = _place(table, str(error)) or otherwise
        if not place:
            raise
        raise ConfigError(f"{place}: {error}") from error


def _place(table: Table, text: str) -> str | None:
    """Where the setting stands that a text names first; else the one whose value it tells."""
    given = {key: setting for key, setting in table.items() if setting.origin != DEFAULT}
    telling = [key for key, setting in given.items() if _tells(text, setting.value)]
    for word in re.findall(r"\w+", text):
        # A feed and its source may have keys of one name; of many, a text may name one.
        keys = (word, OPTIONS + word, f"{word}s", f"{word}es")
        named = [key for key in keys if key in given]
        if named:
            return given[next((key for key in named if key in telling), named[0])].origin
    return given[telling[0]].origin if telling else None


def _tells(text: str, value: Any) -> bool:
    values = value if isinstance(value, list) else [value]
    return any(repr(one) in text for one in values)
