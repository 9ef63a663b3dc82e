"""The flags for settings that a configuration has too, and the settings with both laid over."""

from __future__ import annotations

import argparse
import os
from typing import TYPE_CHECKING, Any

from feeder.cli.arguments import address, count, seconds

if TYPE_CHECKING:
    from feeder.config_file.settings import Settings

CONFIG = "FEEDER_CONFIG"
"""The variable that names the configuration where --config does not."""

_FLAGS: dict[str, tuple[str, dict[str, Any]]] = {
    "--bind": (
        "server.addresses",
        {
            "metavar": "ADDR",
            "action": "append",
            "type": address,
            "help": "where to listen: tcp://HOST:PORT, ipc:///PATH or ipc://NAME; may be given "
            "several times (default: a unix socket in a directory of this user's own)",
        },
    ),
    "--queues": (
        "server.queues",
        {
            "metavar": "N",
            "type": count(1, 4096),
            "help": "queues of each feed (default: as many as it has devices)",
        },
    ),
    "--replicas": (
        "server.replicas",
        {
            "metavar": "R",
            "type": count(1, 1024),
            "help": "trainers that are given the batches of each queue (default: 1)",
        },
    ),
    "--executor": (
        "server.executor",
        {
            "metavar": "KIND[:N]",
            "help": "what fetch functions run on: threads:N, processes:N, processes for as many as "
            "there are cores, ray:N or ray:MIN-MAX for actors on the host's Ray cluster (default: "
            "what each feed says)",
        },
    ),
    "--keys": (
        "server.keys",
        {"metavar": "DIR", "help": "of feeder keygen: only its clients come in"},
    ),
    "--insecure": (
        "server.insecure",
        {"action": "store_true", "help": "let other hosts in without keys"},
    ),
    "--lease": (
        "server.lease",
        {
            "metavar": "SECONDS",
            "type": seconds,
            "help": "for how long a consumer need not be heard of (default: 30)",
        },
    ),
    "--exit-when": (
        "server.exit_when",
        {
            "choices": ("never", "acknowledged"),
            "help": "acknowledged: end by itself once every batch has been used, or a feed has "
            "failed and its consumers were told (default: never)",
        },
    ),
    "--status": (
        "server.status",
        {
            "metavar": "[HOST:]PORT",
            "help": "show a page, /metrics, /healthz and /readyz there (default: nowhere; without "
            "HOST to this host alone)",
        },
    ),
    "--checkpoint-dir": (
        "checkpoint.url",
        {
            "metavar": "DIR",
            "help": "store there what all consumers have used: a folder, or s3://, gs://, az://",
        },
    ),
    "--checkpoint-every": (
        "checkpoint.every_s",
        {
            "metavar": "SECONDS",
            "type": seconds,
            "help": "how often (default: 30), and once more at the end",
        },
    ),
    "--keep": (
        "checkpoint.keep",
        {
            "metavar": "N",
            "type": count(1),
            "help": "how many of these checkpoints stay (default: 3)",
        },
    ),
    "--skip": (
        "server.skip",
        {
            "metavar": "N",
            "type": count(0),
            "help": "leave out so many rounds of all queues there, once, as after a loss spike",
        },
    ),
    "--resume": (
        "checkpoint.resume",
        {
            "metavar": "WHERE",
            "help": "where consumers begin that bring no position: 'latest' of --checkpoint-dir, "
            "the path of a snapshot or checkpoint, or another folder of checkpoints",
        },
    ),
}
"""For each flag: the section and the key that it sets, and how argparse reads it."""


def add_settings(parser: argparse.ArgumentParser) -> None:
    """Add the flags; those that are not given leave nothing in the namespace."""
    for flag, (key, how) in _FLAGS.items():
        # Suppressed: a flag's default would stand over the environment and the file.
        parser.add_argument(flag, dest=key, default=argparse.SUPPRESS, **how)


def read(arguments: argparse.Namespace, name: str | None) -> Settings:
    """The settings: flags over the environment over the file `name`, else the one that
    FEEDER_CONFIG names, over defaults. Raises `ConfigError`."""
    from feeder.config_file.settings import Setting, read_settings
    from feeder.config_file.toml import TomlFile, read_toml

    given: dict[str, dict[str, Setting]] = {}
    for flag, (path, _) in _FLAGS.items():
        if path in arguments:
            section, key = path.split(".")
            given.setdefault(section, {})[key] = Setting(getattr(arguments, path), flag)
    name = name or os.environ.get(CONFIG)
    file = read_toml(name) if name else TomlFile(name="", data={}, lines={})
    return read_settings(file, os.environ, given)
