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
from collections.abc import Awaitable
from dataclasses import is_dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np

from feeder.adapters.arrays import ArrayLoader
from feeder.adapters.loop import EpochLoader, every_epoch, from_plain, to_plain
from feeder.adapters.streams import Mark, whole
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
            pytree of such that has the structure of a batch or of its upper part. What has None
            there stays where it is.
        ahead: Batches that are put on the devices before they are asked for.
    """
    return GlobalBatches(loader, sharding, ahead)


class GlobalBatches:
    """An iterator over the batches of a loader's epochs as `jax.Array`s. One thread iterates and
    owns all fields; any thread may ask for states.

    An error comes in its turn, after the batches before it, and again if it is asked again.
    """

    def __init__(self, loader: EpochLoader, sharding: Any, ahead: int) -> None:
        if not isinstance(loader, EpochLoader):
            raise ConfigError(f"loader is a {type(loader).__name__}, expected a FeedLoader")
        for one in jax.tree.leaves(sharding):
            if not isinstance(one, jax.sharding.Sharding):
                raise ConfigError(
                    f"sharding has a {type(one).__name__}, expected a jax.sharding.Sharding such "
                    "as NamedSharding(mesh, PartitionSpec(...)), or a pytree of such"
                )
        self._loader, self._sharding = loader, sharding
        self._ahead = whole("ahead", ahead, 0)
        self._begin()

    def _begin(self) -> None:
        self._local = every_epoch(self._loader)
        self._taken: tuple[Any, Mark] | None = None
        """A batch that is not on the devices yet."""
        self._placed: deque[tuple[Any, Mark]] = deque()
        self._error: Exception | None = None
        self._used = self._loader.mark

    def __iter__(self) -> GlobalBatches:
        return self

    def __next__(self) -> Any:
        self._fill()
        if self._placed:
            batch, self._used = self._placed.popleft()
            return batch
        error, self._error = self._error, None
        raise StopIteration if error is None else error

    def _fill(self) -> None:
        while self._error is None and len(self._placed) <= self._ahead:
            try:
                if self._taken is None:
                    self._taken = next(self._local), self._loader.mark
                batch, mark = self._taken
                self._placed.append((_place(batch, self._sharding), mark))
                self._taken = None
            except StopIteration:
                return
            except Exception as error:
                self._error = error

    # ---- position

    def get_state(self) -> dict[str, Any]:
        """The position after the batch that was given last: plain values, the same for all
        processes."""
        return to_plain(self._loader.state_at(self._used))

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


# ---- arrays


def _place(batch: Any, sharding: Any) -> Any:
    shardings, structure = jax.tree.flatten(sharding, is_leaf=lambda one: one is None)
    try:
        parts = structure.flatten_up_to(batch)
    except (ValueError, TypeError) as error:
        raise ConfigError(
            f"sharding has another structure than the batch {jax.tree.structure(batch)}: give one "
            f"for all of it, or a pytree of its upper part, with None for texts: {error}"
        ) from error
    placed = [
        jax.tree.map(lambda array, one=one: _place_one(array, one), part)
        for one, part in zip(shardings, parts, strict=True)
    ]
    return jax.tree.unflatten(structure, placed)


def _place_one(array: Any, sharding: Any) -> Any:
    if is_dataclass(array) or isinstance(array, (dict, UserDict)):
        raise ConfigError(
            f"a batch has a {type(array).__name__}, which is no pytree to JAX: register the class "
            "by jax.tree_util, or make dicts and tuples in collate_fn"
        )
    # Texts and numbers stay where they are.
    if sharding is None or not isinstance(array, np.ndarray) or not array.ndim:
        return array
    _check_range(array)
    try:
        return jax.make_array_from_process_local_data(sharding, array)  # type: ignore[no-untyped-call,unused-ignore]
    except ValueError as error:
        error.add_note(
            f"while {len(array)} rows of this process were put over {sharding}: the rows of all "
            "processes must divide by its devices, by batch_size= and drop_last=True"
        )
        raise


def _check_range(array: np.ndarray[Any, Any]) -> None:
    """JAX makes 32 bits of 64, and keeps the lower ones."""
    kept = jax.dtypes.canonicalize_dtype(array.dtype)
    if array.dtype.kind not in "iu" or kept == array.dtype or not array.size:
        return
    least, most = array.min(), array.max()
    if least < np.iinfo(kept).min or most > np.iinfo(kept).max:
        raise ConfigError(
            f"a batch has {array.dtype} from {least} to {most}, of which JAX would keep {kept}: "
            "have jax.config.update('jax_enable_x64', True), or make 32 bits of them in collate_fn"
        )
