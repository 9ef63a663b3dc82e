"""The findings of `feeder doctor` about GPUs: CuPy, the driver, the GPUs, the way of batches."""

from __future__ import annotations

import mmap
import os
import resource
from pathlib import Path
from typing import Any

from feeder.cli.finding import Finding, ok, warning
from feeder.devices.cuda.cupydriver import CupyDriver, count_gpus, import_cupy
from feeder.errors import ConfigError
from feeder.workers.errors import in_words

DRIVER_FILE = Path("/proc/driver/nvidia/version")
"""Where the kernel says which driver it has."""

# Enough for the pinned slots of several feeds, where the driver counts them.
GOOD_LOCKED_BYTES = 2**30
_MIB = 2**20


def check_cupy() -> Finding:
    """Is CuPy there, and does it find a driver?"""
    try:
        cupy = import_cupy("cuda:0")
    except ConfigError as error:
        if DRIVER_FILE.exists():
            cure = "to feed it: pip install 'feedworks[cuda12]' or 'feedworks[cuda13]'"
            return warning(f"there is a GPU's driver, but {str(error).partition(';')[0]}", cure)
        return ok("cupy is not installed: batches stay on the host")
    runtime = cupy.cuda.runtime
    driver, made_for = (
        _version(version()) for version in (runtime.driverGetVersion, runtime.runtimeGetVersion)
    )
    text = f"cupy {cupy.__version__} for CUDA {made_for}, driver for CUDA {driver}"
    try:
        count_gpus(cupy, "cuda:0")
    except ConfigError as error:
        return warning(f"{text}, which says {str(error.__cause__)!r}", "batches stay on the host")
    return ok(text)


def _version(number: int) -> str:
    """CUDA's way to write a version as a number, read."""
    return f"{number // 1000}.{number % 1000 // 10}" if number else "none"


def check_gpus() -> Finding:
    """Which GPUs are there?"""
    drivers = find_gpus()
    if not drivers:
        return ok("no GPU that batches could be put on")
    told = []
    for driver in drivers:
        name, num_bytes = driver.name_and_bytes()
        told.append(f"{driver.name} is {name} with {num_bytes / 2**30:.1f} GiB")
    return ok(", ".join(told))


def find_gpus() -> list[CupyDriver]:
    """The GPUs that can be had."""
    try:
        cupy = import_cupy("cuda:0")
        num = count_gpus(cupy, "cuda:0")
    except ConfigError:
        return []
    return [CupyDriver(cupy, f"cuda:{i}", i) for i in range(num)]


def check_memlock() -> Finding:
    """How much memory may the process lock?"""
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if soft == resource.RLIM_INFINITY:
        return ok("memory may be locked without limit")
    text = f"{soft // _MIB} MiB of memory may be locked"
    if soft < GOOD_LOCKED_BYTES and find_gpus():
        return warning(text, "ulimit -l unlimited, where the driver refuses to pin memory")
    return ok(text)


def check_path() -> Finding:
    """On what way do batches of a server on this host get to each GPU?"""
    drivers = find_gpus()
    if not drivers:
        return ok("batches are copied to no GPU")
    refused = {driver.name: why for driver in drivers if (why := why_not_registered(driver))}
    if not refused:
        return ok("GPUs copy batches from a server's memory itself, which they register")
    told = "; ".join(f"{name}: {why}" for name, why in refused.items())
    return warning(
        f"a server's memory cannot be registered ({told})",
        "batches of a server on this host go by way of pinned slots, one copy more",
    )


def why_not_registered(driver: Any) -> str:
    """Why a GPU may not read a mapping such as a consumer has; empty where it may."""
    try:
        descriptor = os.memfd_create("feeder-doctor", os.MFD_CLOEXEC)
        try:
            os.posix_fallocate(descriptor, 0, mmap.PAGESIZE)
            mapping = mmap.mmap(descriptor, mmap.PAGESIZE, prot=mmap.PROT_READ)
        finally:
            os.close(descriptor)
        driver.register(memoryview(mapping))
    except Exception as error:
        # Whatever the driver raises: it is shown as it says it.
        return in_words(error)
    return ""
