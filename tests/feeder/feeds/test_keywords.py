"""Every keyword of `init_data_input_workers` does something, and its case would notice if not."""

from __future__ import annotations

import inspect
from typing import Any

import pytest

import feeder
from keyword_cases import Init
from keyword_cases_added import CASES
from small import Counted

SIGNATURE = inspect.signature(feeder.init_data_input_workers)
IN_PLACE_OF_REQUIRED = {
    "input_blob_names": ["ignored"],
    "fetch_fun": Counted(1, 1),
    "batch_size": 1,
}
"""What a function that ignored its first arguments might take instead."""
NOTICED = (AssertionError, pytest.fail.Exception, feeder.FeedError, LookupError, ValueError)
ORIGINALS = [
    "input_blob_names", "fetch_fun", "batch_size", "num_worker_threads", "input_source_name",
    "max_buffered_batches", "init_fun", "external_loggers", "dont_rebatch", "batch_columns",
    "timeout",
]  # fmt: skip
"""Those of the original, in its order, without its net."""


def ignoring(keyword: str) -> Init:
    """Return `init_data_input_workers` as if it accepted a keyword and ignored it."""

    def init(*args: Any, **settings: Any) -> feeder.Coordinator:
        bound = SIGNATURE.bind(*args, **settings).arguments
        bound.pop(keyword, None)
        if keyword in IN_PLACE_OF_REQUIRED:
            bound[keyword] = IN_PLACE_OF_REQUIRED[keyword]
        if keyword == "coordinator":
            bound[keyword] = feeder.Coordinator()
        return feeder.init_data_input_workers(**bound)

    return init


@pytest.mark.process
@pytest.mark.usefixtures("exact_bound")
@pytest.mark.parametrize("keyword", CASES)
def test_a_keyword_does_what_it_says(keyword: str) -> None:
    CASES[keyword](feeder.init_data_input_workers)


@pytest.mark.parametrize("keyword", CASES)
def test_a_keyword_that_were_ignored_would_be_noticed(keyword: str) -> None:
    with pytest.raises(NOTICED):
        CASES[keyword](ignoring(keyword))


def test_every_keyword_has_its_case() -> None:
    assert set(CASES) == set(SIGNATURE.parameters)


def test_the_originals_come_first_in_their_order() -> None:
    assert list(SIGNATURE.parameters)[: len(ORIGINALS)] == ORIGINALS
    kinds = [parameter.kind for parameter in SIGNATURE.parameters.values()]
    assert set(kinds[: len(ORIGINALS)]) == {inspect.Parameter.POSITIONAL_OR_KEYWORD}
    assert set(kinds[len(ORIGINALS) :]) == {inspect.Parameter.KEYWORD_ONLY}


def test_the_defaults_are_those_that_are_promised() -> None:
    defaults = {
        name: parameter.default
        for name, parameter in SIGNATURE.parameters.items()
        if parameter.default is not inspect.Parameter.empty
    }
    assert defaults == {
        "batch_size": None, "num_worker_threads": 2, "input_source_name": "train",
        "max_buffered_batches": 100, "init_fun": None, "external_loggers": None,
        "dont_rebatch": False, "batch_columns": None, "timeout": 600.0, "max_buffered_bytes": None,
        "devices": ("cpu",), "seed": 0, "epochs": 1, "last_batch": "keep", "last_round": "uneven",
        "rounds": "stream", "global_batch_size": None, "order": "ticket", "num_threads": None,
        "executor": None, "rows_per_call": None,
        "retries": 0, "retry_backoff_s": 1.0, "repeatable": True, "writable": False, "version": "",
        "depth": 0, "resume": None, "skip": 0, "coordinator": None,
    }  # fmt: skip
