"""Settings with who gave each: flags over the environment, over the file, over defaults."""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from feeder.config_file.keys import checkpoint_keys, convert, feed_keys, parse, server_keys, unknown
from feeder.config_file.toml import TomlFile
from feeder.errors import ConfigError
from feeder.ranks import NO_LAUNCHER, node_of, num_nodes
from feeder.settings import Parameter

DEFAULT = "default"
OPTIONS = "options."
"""The prefix of the keys of a feed's source."""
SECTIONS = ("checkpoint", "feeds", "server")


class Setting(NamedTuple):
    """A value, and who gave it."""

    value: Any
    """The value, of its key's type."""
    origin: str
    """FILE:LINE, the variable of the environment, the flag, or "default"."""


Table = dict[str, Setting]
"""Settings by key; of the options of a source by `options.KEY`."""
Variables = Mapping[str, Mapping[str, str]]
"""The environment, by what the variables of a table begin with; names in full."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """The settings of a service."""

    server: Table
    """The settings of [server]."""
    checkpoint: Table
    """The settings of [checkpoint]."""
    feeds: dict[str, Table]
    """The settings of each [feeds.NAME]."""
    places: dict[str, str]
    """Where each [feeds.NAME] begins, FILE:LINE."""


def read_settings(
    file: TomlFile,
    environment: Mapping[str, str],
    flags: Mapping[str, Mapping[str, Setting]] | None = None,
) -> Settings:
    """Lay the settings over each other; `flags` by section.

    Raises `ConfigError`, with the place in front, where a key is unknown or of a wrong type.
    """
    _check_names(file, file.data, SECTIONS, "table", ())
    feeds = _child(file, file.data, "feeds")
    variables = _sort(environment, feeds)
    given = flags or {}
    return Settings(
        server=_section(file, "server", server_keys(), variables, given),
        checkpoint=_section(file, "checkpoint", checkpoint_keys(), variables, given),
        feeds={name: _place(_feed(file, feeds, name, variables), environment) for name in feeds},
        places={name: file.where("feeds", name) for name in feeds},
    )


def _section(
    file: TomlFile,
    name: str,
    keys: Mapping[str, Parameter],
    variables: Variables,
    flags: Mapping[str, Mapping[str, Setting]],
) -> Table:
    given = _child(file, file.data, name)
    _check_names(file, given, keys, "key", (name,))
    return {
        **_defaults(keys),
        **{key: _from_file(file, keys[key], value, (name, key)) for key, value in given.items()},
        **_from_environment(keys, variables, _prefix(name)),
        **flags.get(name, {}),
    }


def _feed(file: TomlFile, feeds: Mapping[str, Any], name: str, variables: Variables) -> Table:
    keys, path = feed_keys(), ("feeds", name)
    given = dict(_child(file, feeds, name, *path))
    _check_names(file, given, keys, "key", path)
    options = _child(file, given, "options", *path, "options")
    given.pop("options", None)
    found = {
        **_defaults({key: keys[key] for key in keys if key != "options"}),
        **{key: _from_file(file, keys[key], value, (*path, key)) for key, value in given.items()},
        **{
            OPTIONS + key: Setting(value, file.where(*path, "options", key))
            for key, value in options.items()
        },
        **_from_environment(keys, variables, _prefix("feeds", name)),
    }
    return {key: found[key] for key in [*(key for key in keys if key in found), *found]}


def _place(table: Table, environment: Mapping[str, str]) -> Table:
    """The settings, with this node's number and the number of nodes where "node" and "nodes"
    stand for them. Raises `ConfigError` where one is told without the other, or they differ."""
    node, nodes = node_of(environment), num_nodes(environment)
    placed = dict(table)
    for key, word, told in (("shard_id", "node", node), ("num_shards", "nodes", nodes)):
        setting = table.get(OPTIONS + key)
        if setting is None or setting.value != word:
            continue
        # A node's number without their number, or the other way round, would give every node the
        # same shard, in silence.
        alone = (node.variable == NO_LAUNCHER) != (nodes.variable == NO_LAUNCHER)
        if alone or node.number >= nodes.number:
            raise ConfigError(
                f"{setting.origin}: {key} is {word!r}; the node's number is {node.number} "
                f"({node.variable} told), the number of nodes {nodes.number} ({nodes.variable} "
                "told): set FEEDER_NODE and FEEDER_NUM_NODES"
            )
        placed[OPTIONS + key] = Setting(told.number, f"{setting.origin}, told by {told.variable}")
    return placed


def _child(file: TomlFile, table: Mapping[str, Any], key: str, *path: str) -> Mapping[str, Any]:
    """A table inside a table; empty where there is none."""
    value = table.get(key, {})
    if not isinstance(value, dict):
        path = path or (key,)
        raise ConfigError(f"{file.where(*path)}: {'.'.join(path)} is {value!r}, expected a table")
    return value


def _check_names(
    file: TomlFile, table: Mapping[str, Any], known: Any, what: str, path: tuple[str, ...]
) -> None:
    for name in table:
        if name not in known:
            where = f" in [{'.'.join(path)}]" if path else ""
            raise ConfigError(f"{file.where(*path, name)}: {unknown(what + where, name, known)}")


def _defaults(keys: Mapping[str, Parameter]) -> Table:
    return {
        name: Setting(key.default, DEFAULT)
        for name, key in keys.items()
        if key.default is not inspect.Parameter.empty
    }


def _from_file(file: TomlFile, key: Parameter, value: Any, path: tuple[str, ...]) -> Setting:
    where = file.where(*path)
    try:
        return Setting(convert(key, value), where)
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from error


# ---- the environment


def _prefix(*words: str) -> str:
    """The prefix of the variables of a table."""
    return "FEEDER_" + "".join(re.sub(r"\W", "_", word).upper() + "_" for word in words)


def _sort(environment: Mapping[str, str], feeds: Mapping[str, Any]) -> Variables:
    """The variables of each table. Raises `ConfigError` for a feed that is not there."""
    tables = [_prefix("feeds", name) for name in feeds]
    sorted_: dict[str, dict[str, str]] = {}
    for name, text in environment.items():
        # The longest: FEEDER_FEEDS_TRAIN_BIG_SEED is of a feed "train_big", where there is one, and
        # else a key of the feed "train".
        fitting = [p for p in (*tables, *map(_prefix, SECTIONS)) if name.startswith(p)]
        if fitting and not _is_link(name):
            sorted_.setdefault(max(fitting, key=len), {})[name] = text
    for name in sorted_.get(_prefix("feeds"), {}):
        named = ", ".join(map(repr, feeds)) or "none"
        raise ConfigError(f"{name} is of no feed: the configuration has {named}")
    return sorted_


def _is_link(name: str) -> bool:
    """Whether Kubernetes gives a variable to every pod, for a service that happens to be called
    as a section is."""
    return bool(re.search(r"_SERVICE_(HOST|PORT)|_PORT$|_PORT_\d+_(TCP|UDP)", name))


def _from_environment(keys: Mapping[str, Parameter], variables: Variables, prefix: str) -> Table:
    found = {}
    for variable, text in variables.get(prefix, {}).items():
        name = variable.removeprefix(prefix).lower()
        is_option = "options" in keys and name.startswith("options_")
        if name == "options" or (name not in keys and not is_option):
            known = [prefix + key.upper() for key in keys]
            raise ConfigError(unknown("variable", variable, known))
        key = Parameter(name=name, type=Any, default=None) if is_option else keys[name]
        try:
            value = parse(key, text)
        except ConfigError as error:
            raise ConfigError(f"{variable}: {error}") from error
        found[name.replace("_", ".", 1) if is_option else name] = Setting(value, variable)
    return found


# ---- Settings written as TOML, each with a comment that says who gave it


def show(settings: Settings) -> Iterator[str]:
    """The lines of a TOML file that says the same, with a comment on each. What opens doors is
    masked: the file is for logs and tickets."""
    tables = {"server": settings.server, "checkpoint": settings.checkpoint}
    tables |= {f"feeds.{_key(name)}": table for name, table in settings.feeds.items()}
    written = [(name, table) for name, table in tables.items() if table]
    for number, (name, table) in enumerate(written):
        yield from [""] * (number > 0)
        yield f"[{name}]"
        yield from _show(table)


def _show(table: Table) -> Iterator[str]:
    lines = {
        # A dot is of a source's options: it is TOML's own for a table in the table.
        ".".join(map(_key, key.split(".", 1))): setting
        for key, setting in table.items()
    }
    for key, (value, origin) in lines.items():
        is_unset = value is None and origin == DEFAULT
        text = f"# {key} is not set" if is_unset else f"{key} = {_value(_masked(key, value))}"
        yield f"{text:<44}  # {origin}"


_SECRET = re.compile(
    r"passw|secret|token$|credential|signature|private|connection_string|sas(_key)?$"
    r"|(access|account|api)_?key", re.IGNORECASE
)  # fmt: skip
_IN_URL = re.compile(
    r"(?<=://)[^/@\s]*:[^/@\s]*(?=@)|(?:(?<=http://)|(?<=https://))[^/@\s]+(?=@)"
    r"|(?<=[?&])[^=&#\s]+=[^&#\s]*"
)
"""Who asks, with a password or a token, and each parameter: a signed URL is as good as a key."""
_MASK = "***"


def _masked(key: str, value: Any) -> Any:
    match value:
        case str() if _SECRET.search(key):
            return _MASK
        case str() if "://" in value:
            return _IN_URL.sub(_hidden, value)
        case dict():
            return {name: _masked(name, one) for name, one in value.items()}
        case list() | tuple():
            return [_masked(key, one) for one in value]
    return value


def _hidden(found: re.Match[str]) -> str:
    name, is_parameter, _ = found[0].partition("=")
    return f"{name}={_MASK}" if is_parameter else _MASK


def _key(name: str) -> str:
    is_bare = name.replace("-", "_").isascii() and name.replace("-", "_").isidentifier()
    return name if is_bare else json.dumps(name)


def _value(value: Any) -> str:
    """A value as TOML."""
    if value is None:
        return "inf"
    if isinstance(value, dict):
        inner = ", ".join(f"{_key(key)} = {_value(one)}" for key, one in value.items())
        return f"{{ {inner} }}" if inner else "{}"
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(_value, value))}]"
    if isinstance(value, (str, bool)):
        return json.dumps(value, ensure_ascii=False)
    return str(value)
