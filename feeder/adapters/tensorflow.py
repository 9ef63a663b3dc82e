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
import sys
import threading
import weakref
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import tensorflow as tf

from feeder.adapters.arrays import ArrayLoader
from feeder.adapters.loop import EpochLoop, from_plain, to_plain
from feeder.adapters.streams import Mark
from feeder.errors import ConfigError, FeedError

_NOBODY_SAID = -1


class FeedLoader(ArrayLoader):
    """Batches of this process as NumPy arrays, with the arguments of `ArrayLoader`: an epoch per
    loop.

    Rank and number of ranks are those of `TF_CONFIG`, unless they are given; 0 and 1 without both.
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
        self._num_jumps = self._jumps_then = 0
        """How often it was told to go elsewhere, and how often when its last loop began."""
        if rank is None and world_size is None:
            rank, world_size = _worker(os.environ)
        super().__init__(dataset, batch_size, rank=rank, world_size=world_size, **settings)

    def signature(self) -> Any:
        """The structure of batches as `tf.TensorSpec`, which the first one tells."""
        if self._signature is None:
            rows = self.batch_size if self.drop_last else None
            self._signature = _signature(self.peek(), rows)
        return self._signature

    def take(self, loop: EpochLoop, *, is_repeat: bool = False) -> tuple[int, Any]:
        """The next batch of a loop, and the step after it. A loop that TensorFlow begins by itself,
        since an iterator repeats its data, has to follow on a loop that is over."""
        with self._lock:
            if loop.state == "fresh":
                if is_repeat and (self._loop is not None or self._num_jumps != self._jumps_then):
                    raise FeedError(
                        "an iterator over the data set repeats it, and the loader has gone "
                        "elsewhere: begin a new loop; to repeat one batch, take(1).cache().repeat()"
                    )
                self._jumps_then = self._num_jumps
            batch = super()._next(loop)
            return self.step, batch

    def _next(self, loop: EpochLoop) -> Any:
        return self.take(loop)[1]

    def is_last(self, step: int) -> bool:
        """Whether the batch of this step ends its epoch. If nobody knows, the batch after it is
        waited for."""
        with self._lock:
            return self._find(step).place.index == 0

    def _left_for_sure(self, mark: Mark) -> int | None:
        # What an iterable says of its length may be wrong, and tf.data does not ask it.
        return None if self._is_iterable else super()._left_for_sure(mark)

    def _ends_epoch(self, mark: Mark) -> bool:
        left = self._left_for_sure(mark)
        if left is not None:
            return left == 0
        for later in self._ring:
            if later.place[:2] > mark.place[:2]:
                return later.place.epoch != mark.place.epoch
        return self._loop is not None and self._next_epoch() != mark.place.epoch

    def state_dict(self, used: int | None = None) -> dict[str, Any]:
        """The position after the last batch that was given, or after that of step `used`."""
        with self._lock:
            return super().state_dict(used)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from a state: the next loop gives the rest of its epoch. Raises `ResumeError`."""
        with self._lock:
            self._num_jumps += 1
            super().load_state_dict(state_dict)

    def forget(self, used: int) -> None:
        with self._lock:
            super().forget(used)

    def rewind(self, used: int) -> None:
        with self._lock:
            self._num_jumps += 1
            super().rewind(used)


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
    first: list[int] = []

    def generate(number: Any) -> Iterator[Any]:
        loader = weak()
        assert loader is not None
        if loader.is_over:
            # So `.repeat()` ends.
            return
        # The first loop of all is the first one of its iterator.
        first[:] = first or [int(number)]
        loop, is_repeat = iter(loader), first != [int(number)]
        while True:
            try:
                step, batch = loader.take(loop, is_repeat=is_repeat)
            except StopIteration:
                return
            yield (np.int64(step), _ready(batch)) if steps else _ready(batch)

    if steps:
        signature = (tf.TensorSpec((), tf.int64), signature)
    options = tf.data.Options()
    # Each process reads its own batches: to be sharded again would lose some.
    options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.OFF
    made = tf.data.Dataset.from_tensors(0).map(_number).flat_map(
        lambda number: tf.data.Dataset.from_generator(
            generate, args=(number,), output_signature=signature
        )
    ).with_options(options)  # fmt: skip
    made.loader = loader
    return made


def _number(_: Any) -> Any:
    """A number that is the same for the first loop of each iterator, and another one for each loop
    by which it repeats the data: each iterator has the state of such an operation for itself."""
    none, most = tf.constant([], tf.int32), tf.constant(2**31 - 1)
    return tf.raw_ops.RandomUniformInt(
        shape=none, minval=tf.constant(0), maxval=most, seed=1, seed2=1
    )


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


class Used:
    """The step of the last batch that was used, as `FeedState.used`. Owned by the trainer's
    thread."""

    def __init__(self) -> None:
        with tf.device("CPU:0"):
            self._step = tf.Variable(_NOBODY_SAID, dtype=tf.int64, trainable=False)

    def assign(self, step: Any) -> None:
        """Say it, also in a `tf.function`. Of the replicas' steps it is the last one."""
        inside = tf.distribute.get_replica_context()
        if inside is not None and inside.strategy.num_replicas_in_sync > 1:
            raise ConfigError(
                "feed.used.assign(step) was called in strategy.run, where each replica has a step "
                "of its own: call it beside strategy.run, with the step that the loop gives"
            )
        if isinstance(step, tf.distribute.DistributedValues):
            step = tf.reduce_max(tf.stack(step.values))
        self._step.assign(tf.cast(step, tf.int64))

    def numpy(self) -> int:
        """The step; -1 if nobody has said one."""
        return int(self._step.numpy())


class FeedState(tf.train.experimental.PythonState):
    """The position of a loader, for `tf.train.Checkpoint`: after the batch whose step `used` has.

    Owned by the trainer's thread.
    """

    def __init__(self, loader: Any) -> None:
        self.loader = _loader_of(loader)
        self.used = Used()
        """The last batch that was used: `used.assign(step)`."""
        self._begin = self.loader.step

    @property
    def step(self) -> int:
        """The batches that were used since the start. Raises `ConfigError` if batches were
        given, and nobody has said which of them were used."""
        used = self.used.numpy()
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
        used = self.used.numpy()
        self.loader.rewind(self._begin if used == _NOBODY_SAID else used)
        self._note_begin()

    def _note_begin(self) -> None:
        self._begin = self.loader.step
        self.used.assign(_NOBODY_SAID)

    def serialize(self) -> bytes:
        """The position as bytes; called by TensorFlow."""
        return json.dumps(to_plain(self.loader.state_dict(used=self.step))).encode()

    def deserialize(self, string_value: bytes) -> None:
        """Go on from a position; called by TensorFlow. Raises `ResumeError`."""
        self.loader.load_state_dict(from_plain(json.loads(string_value)))
        self._note_begin()


# ---- Keras

_OVER = "the loader's epoch is over"


class FeedCallback(tf.keras.callbacks.Callback):
    """Tells a `FeedState` what `fit` has used, batch by batch. Give it before all other callbacks.

    An epoch of `fit` without `steps_per_epoch` is what is left of the loader's epoch, however long
    that is; the callback ends it. `fit` goes on after the last batch that was used, also where it
    looks at a batch to build the model. Owned by the trainer's thread.
    """

    def __init__(self, feed: FeedState) -> None:
        super().__init__()
        self._feed = feed
        self._per_step = 1
        self._is_first_epoch = True
        self._num_steps = 0
        feed.loader.keep()

    def on_train_begin(self, logs: Any = None) -> None:
        """Begin after the last batch that was used."""
        # What is trained in an epoch's last, incomplete execution is told by nobody.
        if (num := int(self.model.steps_per_execution)) != 1:
            raise ConfigError(f"the model has steps_per_execution={num}, expected 1")
        call = _call_of_fit()
        for other in getattr(call.get("callbacks"), "callbacks", ()):
            if isinstance(other, tf.keras.callbacks.BackupAndRestore):
                raise ConfigError(
                    "BackupAndRestore keeps weights without the position of the data: keep both by "
                    "tf.train.Checkpoint(model=model, optimizer=model.optimizer, feed=feed)"
                )
        self._per_step = _batches_per_step(self.model.distribute_strategy, call)
        self._is_first_epoch = True

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Begin after the last batch that was used, where Keras begins a loop."""
        feed, steps = self._feed, self.params["steps"]
        if self._is_first_epoch or steps is None:
            feed.rewind()
            feed.used.assign(feed.step)
        if self._is_first_epoch and steps is not None and epoch + 1 < self.params["epochs"]:
            self._check_begin(epoch, steps * self._per_step)
        self._is_first_epoch, self._num_steps = False, 0

    def _check_begin(self, epoch: int, num: int) -> None:
        """Keras takes so many batches in each epoch of this call: see that it begins with one."""
        feed, mark = self._feed, self._feed.loader.mark
        is_whole = mark.place.index == 0 and feed.loader._left_for_sure(mark) == num
        if feed.step != epoch * num and not is_whole:
            raise ConfigError(
                f"fit begins with epoch {epoch} after {feed.step} batches, and would use {num} in "
                f"each epoch up to epochs={self.params['epochs']}: leave steps_per_epoch out, or "
                "call fit for each epoch"
            )

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """A batch of each replica was used; of an epoch's last ones there may be fewer."""
        loader = self._feed.loader
        used = min(self._feed.step + self._per_step, loader.step)
        self._feed.used.assign(used)
        loader.forget(used)
        self._num_steps += 1
        if self.params["steps"] is None and not self.model.stop_training and loader.is_last(used):
            # To ask TensorFlow for one more counts a step of the optimizer more.
            self.model.stop_training = _OVER

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Have Keras go on with the next epoch."""
        steps, num = self.params["steps"], self._num_steps
        if self.model.stop_training is _OVER:
            self.model.stop_training = False
        elif not self.model.stop_training and num != steps:
            raise ConfigError(
                f"the data has ended after {num} of {steps or 'some'} steps of epoch {epoch}, and "
                "the optimizer may have counted one more: leave steps_per_epoch out, and give fit "
                "the epochs that the loader has"
            )

    def on_train_end(self, logs: Any = None) -> None:
        """Give back what TensorFlow has taken ahead, so that the loader says where it stands."""
        self._feed.rewind()


def _call_of_fit() -> Mapping[str, Any]:
    """The variables of the call of `fit` that calls this: Keras tells a callback nothing of other
    callbacks, nor how replicas get their batches."""
    frame = sys._getframe()
    while frame is not None and "epoch_iterator" not in frame.f_locals:
        frame = frame.f_back  # type: ignore[assignment]
    return {} if frame is None else frame.f_locals


def _batches_per_step(strategy: Any, call: Mapping[str, Any]) -> int:
    """How many batches of this process a step uses."""
    # The default strategy knows no devices.
    alone = strategy.num_replicas_in_sync == 1
    num = 1 if alone else len(strategy.extended.worker_devices)
    if num == 1:
        return 1
    made = type(getattr(call.get("epoch_iterator"), "_distributed_dataset", None)).__name__
    # Keras splits each batch of a data set that it is given as it is.
    found = {"DistributedDatasetsFromFunction": num, "DistributedDataset": 1}.get(made)
    if found is None:
        raise ConfigError(
            f"the model has {num} replicas, and this version of Keras does not tell whether each "
            "takes batches of its own: write the loop, with dataset(loader, steps=True)"
        )
    return found
