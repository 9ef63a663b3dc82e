"""What `feeder doctor` says of GPUs, over a module like CuPy without one."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from feeder.cli import gpus
from feeder.devices.cuda import cupydriver
from standin.cupys import imported, make_cupy


@pytest.fixture
def cupy() -> Iterator[Any]:
    with imported(make_cupy()) as made:
        yield made


def told() -> list[str]:
    checks = (gpus.check_cupy, gpus.check_gpus, gpus.check_memlock, gpus.check_path)
    return [str(check()) for check in checks]


def lock(monkeypatch: pytest.MonkeyPatch, num_bytes: int) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (num_bytes, num_bytes))


def test_where_all_is_well(cupy: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    lock(monkeypatch, resource.RLIM_INFINITY)
    assert told() == [
        "ok       cupy 14.2.0 for CUDA 13.1, driver for CUDA 12.8",
        "ok       cuda:0 is NVIDIA H200 with 141.0 GiB, cuda:1 is NVIDIA H200 with 141.0 GiB",
        "ok       memory may be locked without limit",
        "ok       GPUs copy batches from a server's memory itself, which they register",
    ]
    names = [call[0] for call in cupy.cuda.runtime.named("hostRegister", "hostUnregister")]
    assert names == ["hostRegister", "hostUnregister"] * 2


def test_without_cupy_batches_stay_on_the_host(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    lock(monkeypatch, 8 * 2**20)
    monkeypatch.setattr(cupydriver.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(gpus, "DRIVER_FILE", tmp_path / "version")
    assert told() == [
        "ok       cupy is not installed: batches stay on the host",
        "ok       no GPU that batches could be put on",
        "ok       8 MiB of memory may be locked",
        "ok       batches are copied to no GPU",
    ]
    (tmp_path / "version").touch()
    assert str(gpus.check_cupy()) == (
        "warning  there is a GPU's driver, but device 'cuda:0' needs CuPy, which is not installed: "
        "to feed it: pip install 'feedworks[cuda12]' or 'feedworks[cuda13]'"
    )


def test_without_a_driver_its_reason_is_told(cupy: Any) -> None:
    cupy.cuda.runtime.errors["getDeviceCount"] = "cudaErrorInsufficientDriver: too old"
    assert str(gpus.check_cupy()) == (
        "warning  cupy 14.2.0 for CUDA 13.1, driver for CUDA 12.8, which says "
        "'cudaErrorInsufficientDriver: too old': batches stay on the host"
    )
    assert str(gpus.check_gpus()) == "ok       no GPU that batches could be put on"


def test_memory_that_cannot_be_registered_is_told_with_the_reason(cupy: Any) -> None:
    cupy.cuda.runtime.errors["hostRegister"] = "cudaErrorNotSupported"
    why = "CUDARuntimeError: cudaErrorNotSupported"
    assert str(gpus.check_path()) == (
        f"warning  a server's memory cannot be registered (cuda:0: {why}; cuda:1: {why}): batches "
        "of a server on this host go by way of pinned slots, one copy more"
    )


def test_little_memory_to_lock_is_told_where_there_is_a_gpu(
    cupy: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    lock(monkeypatch, 64 * 2**20)
    assert str(gpus.check_memlock()) == (
        "warning  64 MiB of memory may be locked: ulimit -l unlimited, where the driver refuses to "
        "pin memory"
    )
