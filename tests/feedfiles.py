"""What the tests of configurations share: a module of feeds, a feed, and reading a text."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest

from feeder.config_file.settings import Setting, Settings, read_settings
from feeder.config_file.toml import parse_toml

MODULE = """
import numpy as np

def fetch(call):
    if call.index == 3:
        raise StopIteration
    return [np.full((4, 2), call.index)]

def stateful(worker_id, batch_size):
    return [np.ones((4, 2))]

def make(rows=4, stop=3):
    left = {}
    def new(worker_id, batch_size):
        left[worker_id] = left.get(worker_id, stop) - 1
        if left[worker_id] < 0:
            raise StopIteration
        return [np.full((rows, 2), left[worker_id])]
    return new

def make_wrongly(): raise OSError("no such disk")
def make_verbosely(): raise OSError("no such disk\\n  look")

def begin(feed, coordinator): begun.append(feed)
begun = []

class Log:
    def log(self, values): pass
log = Log()
dataset = [np.full(2, i) for i in range(8)]
number = 7
"""

FEED = """
[feeds.train]
input_blob_names = ["x"]
batch_size = 8
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, with a module of fetch functions and a file of arrays."""
    (tmp_path / "filed_feeds.py").write_text(MODULE)
    np.save(tmp_path / "x.npy", np.arange(20).reshape(10, 2))
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "filed_feeds", raising=False)
    return tmp_path


def read(text: str, environment: Mapping[str, str] | None = None, **flags: Setting) -> Settings:
    return read_settings(parse_toml("feed.toml", text), environment or {}, {"server": flags})
