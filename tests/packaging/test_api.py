"""The API's page: what is public is documented and has its public name."""

from __future__ import annotations

import inspect
import pickle  # noqa: TID251  (users may send what is public through it)
import sys
import types

import pytest

import feeder
import feeder.errors
import feeder.job
import feeder.sources
import feeder.workers.sources

MEMBERS = (types.FunctionType, classmethod, property, staticmethod)
PUBLIC = [
    (module.__name__, name)
    for module in (feeder, feeder.sources, feeder.job)
    for name in module.__all__
    if not isinstance(getattr(module, name), types.ModuleType)
]
"""Each public class and function with the module by which users know it."""
ERRORS = [name for name in feeder.errors.__all__ if name != "ReplayWarning"]
FRONT_DOOR = {"Batch", "Call", "Coordinator", "Feed", "Snapshot", "init_data_input_workers"}


def test_public_names_are_sorted_and_complete() -> None:
    errors = {
        name
        for name, value in vars(feeder.errors).items()
        if inspect.isclass(value) and issubclass(value, (feeder.errors.FeedError, Warning))
    }
    assert feeder.__all__ == sorted(set(feeder.__all__))
    assert set(feeder.__all__) >= FRONT_DOOR | errors
    assert set(dir(feeder)) >= set(feeder.__all__)


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no_such_name"):
        feeder.no_such_name  # noqa: B018
    with pytest.raises(AttributeError, match=r"'feeder\.sources' has no attribute 'lmdb'"):
        feeder.sources.lmdb  # noqa: B018


def test_public_names_and_their_members_are_documented() -> None:
    assert feeder.job.__all__ == sorted(feeder.job.__all__)
    for value in [getattr(feeder, name) for name in feeder.__all__] + [
        getattr(feeder.job, name) for name in feeder.job.__all__
    ]:
        assert inspect.getdoc(value), f"{value} has no docstring"
        silent = [
            member
            for member, code in vars(value).items()
            if not member.startswith("_")
            and isinstance(code, MEMBERS)
            and not inspect.getdoc(getattr(value, member))
        ]
        assert silent == [], f"{value} has members without a docstring"


def test_a_public_name_reports_its_public_module() -> None:
    for module, name in PUBLIC:
        value = getattr(sys.modules[module], name)
        assert (value.__module__, value.__qualname__) == (module, name)
        assert pickle.loads(pickle.dumps(value)) is value
        assert not isinstance(value, types.FunctionType) or inspect.signature(value).parameters


def test_an_error_is_pickled_by_its_public_name() -> None:
    for name in ERRORS:
        kind = getattr(feeder, name)
        fields = {"worker_id": 3, "call": 7} if issubclass(kind, feeder.FetchError) else {}
        data = pickle.dumps(kind("what happened", **fields), protocol=0)
        assert f"cfeeder\n{name}\n".encode() in data
        again = pickle.loads(data)
        assert (type(again), str(again)) == (kind, "what happened")
        assert {field: getattr(again, field) for field in fields} == fields


def test_the_page_of_sources_is_that_of_workers_sorted_and_documented() -> None:
    assert feeder.sources.__all__ == sorted(feeder.workers.sources.__all__)
    assert set(dir(feeder.sources)) >= set(feeder.sources.__all__)
    for name in feeder.sources.__all__:
        assert getattr(feeder.sources, name) is getattr(feeder.workers.sources, name)
        assert inspect.getdoc(getattr(feeder.sources, name)), name
