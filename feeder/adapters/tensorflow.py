"""TensorFlow: a `tf.data.Dataset` of a feed, and its position in `tf.train.Checkpoint`.

```python
loader = FeedLoader(samples, batch_size=32, shuffle=True)
feed = FeedState(loader)
checkpoint = tf.train.Checkpoint(model=model, optimizer=optimizer, feed=feed)
for step, (x, y) in dataset(loader, steps=True).prefetch(2):
    ...
    feed.used.assign(step)
```

TensorFlow takes batches ahead of the trainer, in threads of its own, and nobody can ask it for how
many. So batches carry their step, and the trainer says which one it used last.
"""

from __future__ import annotations

import json
import os
import threading
import weakref
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import tensorflow as tf

from feeder.adapters.arrays import ArrayLoader
from feeder.adapters.loop import EpochLoop, from_plain, to_plain
from feeder.errors import ConfigError

_NOBODY_SAID = -1


class FeedLoader(ArrayLoader):
    """Batches of this process as NumPy arrays, with the arguments of `ArrayLoader`: an epoch per
    loop.

    Rank and number of ranks are those of `TF_CONFIG`, else of the launcher, unless they are given.
    The state after an epoch's last batch is one of the next epoch. TensorFlow iterates in one
    thread after another, and so a lock owns the place of the loop.
    """

    counts_batches = True

    def __init__(
        self,
        dataset: Any,
        batch_size: int | None = None,
        *,
        rank: int | None = None,
        world_size: int | None = None,
        **settings: Any,
    ) -> None:
        self._lock = threading.Lock()
        self._signature: Any = None
        if rank is None and world_size is None:
            rank, world_size = _worker(os.environ)
        super().__init__(dataset, batch_size, rank=rank, world_size=world_size, **settings)

    def signature(self) -> Any:
        """The structure of batches as `tf.TensorSpec`, which the first one tells."""
        if self._signature is None:
            rows = self.batch_size if self.drop_last else None
            self._signature = _signature(self.peek(), rows)
        return self._signature

    def take(self, loop: EpochLoop) -> tuple[int, Any]:
        """The next batch of a loop, and the step after it."""
        with self._lock:
            batch = super()._next(loop)
            return self.step, batch

    def _next(self, loop: EpochLoop) -> Any:
        return self.take(loop)[1]

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from a state: the next loop gives the rest of its epoch. Raises `ResumeError`."""
        with self._lock:
            super().load_state_dict(state_dict)


def _worker(environment: Mapping[str, str]) -> tuple[int | None, int | None]:
    """The rank of this process among the workers that TF_CONFIG names; two times None without."""
    try:
        told = json.loads(environment.get("TF_CONFIG") or "{}")
        workers = [
            (kind, number)
            for kind in ("chief", "worker")
            for number in range(len(told.get("cluster", {}).get(kind, ())))
        ]
        task = told.get("task", {})
        this = task.get("type"), int(task.get("index", 0))
    except (ValueError, TypeError, AttributeError) as error:
        raise ConfigError(f"TF_CONFIG is {environment['TF_CONFIG']!r}: {error}") from error
    return (workers.index(this), len(workers)) if this in workers else (None, None)


# ---- batches


def dataset(loader: Any, *, steps: bool = False, signature: Any = None) -> tf.data.Dataset:
    """The batches of a loader: each loop over the data set is the loader's next epoch.

    Args:
        loader: A `FeedLoader`, or a feed or consumer.
        steps: Whether elements are `(step, batch)`, for `FeedState.used`.
        signature: A structure of `tf.TensorSpec` for batches. By default that of the first batch,
            with any number of rows; where other lengths differ, too, give one with None for these.
    """
    loader = _loader_of(loader)
    signature = loader.signature() if signature is None else signature

    # TensorFlow keeps the function for good; the data set keeps the loader.
    weak = weakref.ref(loader)

    def generate() -> Iterator[Any]:
        loader = weak()
        assert loader is not None
        loop = iter(loader)
        while True:
            try:
                step, batch = loader.take(loop)
            except StopIteration:
                return
            yield (np.int64(step), _ready(batch)) if steps else _ready(batch)

    if steps:
        signature = (tf.TensorSpec((), tf.int64), signature)
    options = tf.data.Options()
    # Each process reads its own batches: to be sharded again would lose some.
    options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.OFF
    made = tf.data.Dataset.from_generator(generate, output_signature=signature)
    made.loader = loader
    return made.with_options(options)


def _loader_of(given: Any) -> FeedLoader:
    return given if isinstance(given, FeedLoader) else FeedLoader(given)


def _ready(value: Any) -> Any:
    """A batch of what TensorFlow makes tensors of. It takes a list for one tensor."""
    if isinstance(value, Mapping):
        return {name: _ready(child) for name, child in value.items()}
    if isinstance(value, list) and all(isinstance(item, (str, bytes)) for item in value):
        return np.array(value, object)
    if isinstance(value, list):
        return tuple(map(_ready, value))
    if isinstance(value, tuple):
        children = map(_ready, value)
        return type(value)(*children) if hasattr(value, "_fields") else tuple(children)
    return value


def _signature(batch: Any, rows: int | None) -> Any:
    def spec(value: Any) -> tf.TensorSpec:
        if value is None:
            raise ConfigError("a batch has None in it, which is no tensor: leave it out in "
                              "collate_fn, or give signature=")  # fmt: skip
        if not isinstance(value, np.ndarray):
            return tf.TensorSpec.from_tensor(tf.convert_to_tensor(value))
        shape: list[int | None] = list(value.shape)
        if shape and shape[0] != rows:
            shape[0] = None
        return tf.TensorSpec(shape, tf.string if value.dtype == object else value.dtype)

    return tf.nest.map_structure(spec, _ready(batch))


# ---- position


class FeedState(tf.train.experimental.PythonState):
    """The position of a loader, for `tf.train.Checkpoint`: after the batch whose step `used` has.

    Owned by the trainer's thread.
    """

    def __init__(self, loader: Any) -> None:
        self.loader = _loader_of(loader)
        self.used = tf.Variable(_NOBODY_SAID, dtype=tf.int64, trainable=False)
        """The step of the last batch that was used: `used.assign(step)`, also in a `tf.function`.
        -1 where nobody has said one."""
        self._begin = self.loader.step

    @property
    def step(self) -> int:
        """The batches that were used since the start. Raises `ConfigError` where batches were
        given, and nobody has said which of them were used."""
        used = int(self.used.numpy())
        if used != _NOBODY_SAID:
            return used
        if self.loader.step != self._begin:
            raise ConfigError(
                f"the loader has given batches up to step {self.loader.step}, and FeedState was "
                "not told which were used: have dataset(..., steps=True) and call "
                "feed.used.assign(step), or give FeedCallback to fit"
            )
        return self._begin

    def rewind(self) -> None:
        """Have the next loop begin after the last batch that was used: batches that were taken and
        of which nobody said so are given again."""
        used = int(self.used.numpy())
        self._load(self.loader.state_dict(used=self._begin if used == _NOBODY_SAID else used))

    def _load(self, state: dict[str, Any]) -> None:
        self.loader.load_state_dict(state)
        self._begin = self.loader.step
        self.used.assign(_NOBODY_SAID)

    def serialize(self) -> bytes:
        """The position as bytes; called by TensorFlow."""
        return json.dumps(to_plain(self.loader.state_dict(used=self.step))).encode()

    def deserialize(self, string_value: bytes) -> None:
        """Go on from a position; called by TensorFlow. Raises `ResumeError`."""
        self._load(from_plain(json.loads(string_value)))


class FeedCallback(tf.keras.callbacks.Callback):
    """Tells a `FeedState` what `fit` has used, batch by batch. Give it before callbacks that save,
    and call `fit` for an epoch, with `steps_per_epoch=loader.left`.

    A call of `fit` goes on after the last batch that was used, also where it looks at a batch to
    build the model. Owned by the trainer's thread.
    """

    def __init__(self, feed: FeedState) -> None:
        super().__init__()
        self._feed = feed

    def on_train_begin(self, logs: Any = None) -> None:
        """Begin after the last batch that was used."""
        # What is trained in an epoch's last, incomplete execution is told by nobody.
        if (num := int(self.model.steps_per_execution)) != 1:
            raise ConfigError(f"the model has steps_per_execution={num}, expected 1")
        # At an end that it does not know Keras counts a step more, and keeps the number of steps of
        # its first epoch for all.
        if self.params["steps"] is None:
            raise ConfigError(
                "steps_per_epoch is not given: call fit for each epoch with "
                "steps_per_epoch=loader.left"
            )
        self._feed.rewind()
        self._feed.used.assign(self._feed.step)

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """A batch was used."""
        self._feed.used.assign_add(1)
