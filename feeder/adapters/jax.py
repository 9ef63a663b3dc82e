"""JAX: batches as arrays over a sharding, from one order for all processes.

```python
loader = FeedLoader(dataset, batch_size=32, shuffle=True)      # rows of this process
for batch in global_batches(loader, sharding):                 # jax.Array over all of them
    ...
```

Its position is that of the batch that was used, however many were put on devices ahead: for Orbax,
and by `get_state` and `set_state` for whatever takes Grain's iterators.
"""

from __future__ import annotations

import json
from collections import UserDict, deque
from collections.abc import Awaitable, Iterator
from dataclasses import is_dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np

from feeder.adapters.arrays import ArrayLoader
from feeder.adapters.loop import EpochLoader, every_epoch, from_plain, to_plain
from feeder.adapters.streams import whole
from feeder.errors import ConfigError

_FILE = "feeder.json"


class FeedLoader(ArrayLoader):
    """Batches of this process as NumPy arrays, with the arguments of `ArrayLoader`: an epoch per
    loop. The thread that trains owns it.

    Rank and number of ranks are `jax.process_index` and `jax.process_count`, unless they are given.
    Processes that hold replicas of the same rows give the same rank. Compiled functions want equal
    shapes, so `drop_last` is True by default.
    """

    def __init__(
        self,
        dataset: Any,
        batch_size: int | None = None,
        *,
        drop_last: bool = True,
        rank: int | None = None,
        world_size: int | None = None,
        **settings: Any,
    ) -> None:
        if rank is None and world_size is None:
            rank, world_size = jax.process_index(), jax.process_count()
        settings |= {"drop_last": drop_last, "rank": rank, "world_size": world_size}
        super().__init__(dataset, batch_size, **settings)


def global_batches(loader: EpochLoader, sharding: Any, *, ahead: int = 1) -> GlobalBatches:
    """One epoch after another, each batch as arrays over all processes.

    Args:
        loader: Gives the rows of this process.
        sharding: How the rows of all processes lie on the devices: a `jax.sharding.Sharding`, or a
            pytree of such by leaf.
        ahead: Batches that are put on the devices before they are asked for.
    """
    return GlobalBatches(loader, sharding, ahead)


class GlobalBatches:
    """An iterator over the batches of a loader's epochs as `jax.Array`s. One thread iterates and
    owns all fields; any thread may ask for states."""

    def __init__(self, loader: EpochLoader, sharding: Any, ahead: int) -> None:
        if not isinstance(loader, EpochLoader):
            raise ConfigError(f"loader is a {type(loader).__name__}, expected a FeedLoader")
        self._loader, self._sharding = loader, sharding
        self._ahead = whole("ahead", ahead, 0)
        self._begin()

    def _begin(self) -> None:
        self._local = self._batches()
        self._placed: deque[tuple[Any, int]] = deque()
        self._used = self._loader.step

    def _batches(self) -> Iterator[tuple[Any, int]]:
        for batch in every_epoch(self._loader):
            yield self._place(batch), self._loader.step

    def _place(self, batch: Any) -> Any:
        is_one = isinstance(self._sharding, jax.sharding.Sharding)

        def place(array: Any, sharding: Any) -> Any:
            if is_dataclass(array) or isinstance(array, (dict, UserDict)):
                raise ConfigError(
                    f"a batch has a {type(array).__name__}, which is no pytree to JAX: register "
                    "the class by jax.tree_util, or make dicts and tuples in collate_fn"
                )
            # Texts and numbers stay where they are.
            if not isinstance(array, np.ndarray) or not array.ndim:
                return array
            try:
                return jax.make_array_from_process_local_data(sharding, array)  # type: ignore[no-untyped-call,unused-ignore]
            except ValueError as error:
                error.add_note(
                    f"while {len(array)} rows of this process were put over {sharding}: the rows "
                    "of all processes must divide by its devices, by batch_size= and drop_last=True"
                )
                raise

        if is_one:
            return jax.tree.map(lambda array: place(array, self._sharding), batch)
        return jax.tree.map(place, batch, self._sharding)

    def __iter__(self) -> GlobalBatches:
        return self

    def __next__(self) -> Any:
        while len(self._placed) <= self._ahead:
            found = next(self._local, None)
            if found is None:
                break
            self._placed.append(found)
        if not self._placed:
            raise StopIteration
        batch, self._used = self._placed.popleft()
        return batch

    # ---- position

    def get_state(self) -> dict[str, Any]:
        """The position after the batch that was given last: plain values, the same for all
        processes."""
        return to_plain(self._loader.state_dict(used=self._used))

    def set_state(self, state: dict[str, Any]) -> None:
        """Go on from a state. Raises `ResumeError`."""
        self._loader.load_state_dict(from_plain(state))
        self._begin()

    # ---- Orbax: `StatefulCheckpointable`

    async def save(self, directory: Any) -> Awaitable[None]:
        """Write the position into a folder of a checkpoint; the second part waits for the disk."""
        # Taken before the first part returns: the trainer goes on then.
        state = json.dumps(self.get_state())

        async def write() -> None:
            folder = directory
            if hasattr(directory, "await_creation"):
                folder = await directory.await_creation()
            if jax.process_index() == 0:
                (Path(folder) / _FILE).write_text(state)

        return write()

    async def load(self, directory: Any) -> Awaitable[None]:
        """Go on from the position in a folder of a checkpoint."""

        async def read() -> None:
            self.set_state(json.loads((Path(directory) / _FILE).read_text()))

        return read()
