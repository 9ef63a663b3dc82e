"""A function that draws from torch's generator gives the same in any number of processes."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from feeder import Processes
from feeder.workers.fetch import seeding
from feeds import drain
from needs import needs_framework
from remote import drawing_late

needs_framework("torch")

import torch


def test_a_seed_is_the_one_that_manual_seed_would_set() -> None:
    seeds = seeding._TorchSeeds()
    before = torch.get_rng_state()
    for seed in (0, 5, 2**63 - 1):
        seeds.seed(torch, seed)
        drawn = torch.rand(4), torch.randn(3), torch.randint(9, (5,))
        torch.manual_seed(seed)
        wanted = torch.rand(4), torch.randn(3), torch.randint(9, (5,))
        assert all(map(torch.equal, drawn, wanted))
    torch.set_rng_state(before)


class Device:
    """Stands in for `torch.cuda`: two devices that are put to use when `begin` is called."""

    def __init__(self) -> None:
        self.waiting: list[Callable[[], None]] = []
        self.is_used = False
        self.default_generators = [torch.Generator() for _ in range(2)]

    def is_initialized(self) -> bool:
        return self.is_used

    def device_count(self) -> int:
        return 2

    def _lazy_call(self, call: Callable[[], None], *, seed_all: bool) -> None:
        assert seed_all
        self.waiting.append(call)

    def manual_seed_all(self, seed: int) -> None:
        assert self.is_used
        for generator in self.default_generators:
            generator.manual_seed(seed)

    def begin(self) -> None:
        self.is_used = True
        for call in self.waiting:
            call()


def test_a_device_has_the_newest_seed_from_its_first_use_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cuda, xpu = Device(), Device()
    monkeypatch.setattr(torch, "cuda", cuda)
    monkeypatch.setattr(torch, "xpu", xpu)
    seeds = seeding._TorchSeeds()
    before = torch.get_rng_state()
    for seed in (3, 4):
        seeds.seed(torch, seed)
    cuda.begin()
    assert [g.initial_seed() for g in cuda.default_generators] == [4, 4]
    seeds.seed(torch, 5)
    assert [g.initial_seed() for g in cuda.default_generators] == [5, 5]
    xpu.begin()
    assert [g.initial_seed() for g in xpu.default_generators] == [5, 5]
    assert len(cuda.waiting) == len(xpu.waiting) == 1
    torch.set_rng_state(before)


def test_draws_of_a_call_that_imports_torch_are_its_own() -> None:
    settings = {"input_blob_names": ["x"], "batch_size": 3, "epochs": 2, "timeout": 60.0}
    whole = drain(drawing_late, executor=Processes(1), **settings)
    assert len({record[4] for record in whole}) == len(whole) > 9
    assert drain(drawing_late, executor=Processes(2), **settings) == whole
    imported = Processes(1, preload=["torch"])
    assert drain(drawing_late, executor=imported, **settings) == whole
