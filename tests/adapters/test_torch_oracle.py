"""feeder's DataLoader and PyTorch's over random programs: each row, class, error and draw."""

from __future__ import annotations

from itertools import cycle, islice
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import example, given, settings

from needs import needs_framework
from parts import examples

needs_framework("torch")

import torch.utils.data as tud

from adapters.torch_programs import Program, compare, programs
from feeder.adapters.torch import DataLoader

# A sampler that draws as soon as it is iterated over. PyTorch iterates over it twice to begin
# workers, and once without them.
EAGER = Program(
    data="map", num=3, item="number", sampler="global random", batches="size", batch_size=None,
    drop_last=False, collate="default", workers=1, persistent=False, fails_at=None, error="value",
    shares=False, actions=(("loop", None),),
)  # fmt: skip


@settings(max_examples=examples(640))
@given(programs(0))
def test_a_program_runs_as_on_pytorchs_loader(program: Program) -> None:
    compare(program)


# JAX says so of each fork once another test has imported it.
@pytest.mark.filterwarnings("ignore:os.fork")
@pytest.mark.timeout(300)
@settings(max_examples=examples(160))
@given(programs(3))
@example(EAGER)
def test_a_program_with_workers_runs_as_on_pytorchs_loader(program: Program) -> None:
    compare(program)


@settings(max_examples=examples(400))
@given(
    st.integers(1, 40), st.integers(1, 4), st.booleans(), st.booleans(), st.integers(0, 2),
    st.data(), st.lists(st.integers(1, 4), min_size=2, max_size=4),
)  # fmt: skip
def test_any_number_of_ranks_goes_on_with_a_distributed_sampler(
    num: int, size: int, shuffle: bool, drop_last: bool, epoch: int, data: st.DataObject,
    worlds: list[int],
) -> None:  # fmt: skip
    def ranks(world: int, cls: Any = DataLoader) -> list[Any]:
        settings = {"shuffle": shuffle, "drop_last": drop_last, "seed": 3}
        dealt = [tud.DistributedSampler(range(num), world, i, **settings) for i in range(world)]
        for sampler in dealt:
            sampler.set_epoch(epoch)
        return [cls(range(num), size, sampler=sampler) for sampler in dealt]

    def rows(loaders: list[Any], most: int | None = None) -> list[list[list[int]]]:
        return [[batch.tolist() for batch in islice(loader, most)] for loader in loaders]

    assert rows(ranks(worlds[0])) == rows(ranks(worlds[0], tud.DataLoader))
    (whole,) = rows(ranks(1, tud.DataLoader))
    order: list[int] = []
    state = None
    for leg, world in enumerate(worlds, 1):
        loaders = ranks(world)
        for loader in loaders:
            if state is not None:
                loader.load_state_dict(state)
        most = None if leg == len(worlds) else data.draw(st.integers(0, 3))
        given = rows(loaders, most)
        # Steps of all ranks are of one size, the last of an epoch too. In each the ranks have one
        # sample of the order in turn, as it was dealt out.
        for step in zip(*given, strict=True):
            order += [row for column in zip(*step, strict=True) for row in column]
        if most is None or len(given[0]) < most:
            break  # The epoch has ended.
        (state,) = {str(one): one for one in (each.state_dict() for each in loaders)}.values()
    # Each once, but for what is left out, or comes again to make the last step whole.
    left = num - len(order)
    assert 0 <= left < world if drop_last else 0 <= -left < max(worlds)
    assert order == [*islice(cycle(row for batch in whole for row in batch), len(order))]
