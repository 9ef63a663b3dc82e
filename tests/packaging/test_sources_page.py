"""`feeder.sources`: the sources under the feeder's name, loaded when it is first looked at."""

from __future__ import annotations

import inspect
import json
import subprocess
import sys
from pathlib import Path

import pytest

import feeder
import feeder.workers.sources

ROOT = Path(__file__).parents[2]
TELL = "import sys, json; print(json.dumps([m for m in sys.modules if 'workers' in m]))"
EXTRAS = "import sys; assert not {'PIL', 'lmdb', 'simplejpeg'} & sys.modules.keys()"


def modules_after(code: str) -> list[str]:
    """Return the modules of workers that a fresh interpreter has loaded after `code`."""
    done = subprocess.run(
        [sys.executable, "-c", f"{code}\n{EXTRAS}\n{TELL}"],
        cwd=ROOT, capture_output=True, text=True, check=True,
    )  # fmt: skip
    return list(json.loads(done.stdout))


def test_the_page_is_that_of_workers_and_sorted() -> None:
    assert feeder.sources.__all__ == sorted(feeder.workers.sources.__all__)
    assert set(dir(feeder.sources)) >= set(feeder.sources.__all__)


@pytest.mark.parametrize("name", feeder.sources.__all__)
def test_a_name_is_the_one_of_workers_and_documented(name: str) -> None:
    assert getattr(feeder.sources, name) is getattr(feeder.workers.sources, name)
    assert inspect.getdoc(getattr(feeder.sources, name))


@pytest.mark.process
def test_sources_are_loaded_at_first_use_and_need_no_extra() -> None:
    assert "feeder.workers.sources" not in modules_after(
        "import feeder; feeder.init_data_input_workers"
    )
    assert "feeder.workers.sources" in modules_after("import feeder; feeder.sources")
    assert "feeder.workers.sources" in modules_after(
        "from feeder.sources import caffe_lmdb, image_folder"
    )


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match=r"'feeder\.sources' has no attribute 'lmdb'"):
        feeder.sources.lmdb  # noqa: B018
