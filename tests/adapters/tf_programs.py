"""Random jobs of TensorFlow and Keras, undisturbed, and killed at every step and resumed.

A configuration is drawn by a seed: what is read, and how it is trained: by loops, by one loop of
`repeat`, by `fit` without a number of steps, for each epoch or with steps of its own, on replicas.
Steps, weights, steps of the optimizer and, where they can be seen, rows have to be those of the
undisturbed run, from `tf.train.Checkpoint` alone. A kill is a run that is left there.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import random
import warnings
from pathlib import Path
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")

import numpy as np

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import tensorflow as tf

    from feeder.adapters.tensorflow import FeedCallback, FeedLoader, FeedState, dataset

import feeder
from adapters.campaigns import campaign
from adapters.job_data import DATA, Data

WAYS = ("loop", "repeat", "fit", "fit", "fit each", "fit steps", "unbuilt", "split", "each",
        "loop of replicas")  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Configuration:
    """What a job is."""

    data: Data
    way: str
    prefetch: int
    most_epochs: int
    steps: int
    seed: int


def draw(dice: random.Random) -> Configuration:
    """A random one."""
    kind = dice.choice(("map", "map", *DATA))
    way = dice.choice(WAYS)
    size = dice.choice((1, 2, 3, 4)) if way != "split" else dice.choice((2, 4))
    drop_last = way == "split" or dice.random() < 0.5
    most_epochs = dice.choice((1, 2, 2, 3))
    is_own = kind in ("feed", "served")
    is_finite = is_own or way == "repeat" or (way != "fit steps" and dice.random() < 0.3)
    data = Data(
        kind=kind, num=dice.randint(2 * size, 5 * size), size=size, shuffle=kind == "map",
        epochs=most_epochs if is_finite else None, drop_last=drop_last,
    )  # fmt: skip
    epoch = len(data.expected())
    # Keras itself cannot add up a last step of which a replica has no row.
    way = "fit" if way == "each" and epoch % 2 else way
    # A loader that ends has to have the steps that fit takes.
    steps = dice.randint(1, epoch if is_finite else epoch + 2)
    return Configuration(data, way, dice.choice((0, 1, 3)), most_epochs, steps, dice.randrange(99))


# ---- models, which are compiled once


class Net(tf.keras.Model):
    """Built by its first batch; run eagerly."""

    def __init__(self) -> None:
        super().__init__()
        self.dense = tf.keras.layers.Dense(1, kernel_initializer="ones")

    def call(self, x: Any) -> Any:
        return self.dense(x)


# Two replicas, if nothing of TensorFlow has run in this process.
with contextlib.suppress(RuntimeError):
    tf.config.set_logical_device_configuration(
        tf.config.list_physical_devices("CPU")[0], [tf.config.LogicalDeviceConfiguration()] * 2
    )


@functools.cache
def strategy_of(way: str) -> Any:
    """A replica on each logical CPU, or none."""
    if way not in ("split", "each", "loop of replicas"):
        return tf.distribute.get_strategy()
    cpus = tf.config.list_logical_devices("CPU")
    return tf.distribute.MirroredStrategy([f"cpu:{n}" for n in range(len(cpus))])


@functools.cache
def compiled(strategy: Any) -> Any:
    """A model that is built, and its weights at the start."""
    with strategy.scope():
        model = tf.keras.Sequential([
            tf.keras.layers.Input((1,)), tf.keras.layers.Dense(1, kernel_initializer="ones")
        ])  # fmt: skip
        model.compile(tf.keras.optimizers.Adam(0.1), "mse")
        model.optimizer.build(model.trainable_variables)
    return model, [v.numpy() for v in (*model.variables, *model.optimizer.variables)]


class Job:
    """A job's loader, model and checkpoint."""

    def __init__(self, c: Configuration, server: str) -> None:
        self.configuration, data = c, c.data
        self.log: list[Any] = []
        self.rows: list[Any] = []
        self.saves: Path | None = None
        self.loader, self.feed = data.open(
            FeedLoader, lambda i: (np.full(1, i / 7, np.float32), i), server, seed=c.seed
        )
        self.state = FeedState(self.loader)
        self.strategy = strategy_of(c.way)
        if c.way == "unbuilt":
            self.model = Net()
            self.model.compile(tf.keras.optimizers.Adam(0.1), "mse", run_eagerly=True)
        else:
            self.model, begins = compiled(self.strategy)
            for variable, value in zip(
                (*self.model.variables, *self.model.optimizer.variables), begins, strict=True
            ):
                variable.assign(value)
        self.checkpoint = tf.train.Checkpoint(
            model=self.model, optimizer=self.model.optimizer, feed=self.state
        )

    def note(self) -> None:
        """A step is done: what there is to see of it."""
        weights = [weight.tolist() for weight in self.model.get_weights()]
        iterations = int(self.model.optimizer.iterations.numpy())
        self.log.append((self.state.step, iterations, repr(weights)))
        if self.saves is not None:
            self.checkpoint.write(str(self.saves / f"{len(self.log)}"))

    def run(self, saved: str | None = None) -> Job:
        """Train to the end, from a checkpoint on."""
        c = self.configuration
        with contextlib.ExitStack() as stack:
            stack.callback(self.loader.close)
            if saved is not None:
                if c.way == "unbuilt":
                    # What is restored has to be there; `fit` looks at a batch all the same.
                    self.model(np.zeros((1, 1)))
                    self.model.optimizer.build(self.model.trainable_variables)
                self.checkpoint.read(saved)
                if c.data.is_own and self.loader.epoch >= c.most_epochs:
                    # No batch tells the signature.
                    return self
            if self.feed is not None:
                stack.enter_context(self.feed)
            is_loop = c.way in ("loop", "repeat", "loop of replicas")
            self.loop() if is_loop else self.fit()
        return self

    def made(self, **named: Any) -> Any:
        """The data set as this way wants it."""
        way, data = self.configuration.way, self.configuration.data

        def make(context: Any = None) -> Any:
            made = dataset(self.loader, **named)
            if data.is_own:
                made = made.map(lambda *e: (*e[:-1], (e[-1]["x"], e[-1]["y"])) if e[1:]
                                else (e[0]["x"], e[0]["y"]))  # fmt: skip
            made = made.repeat() if way in ("repeat", "fit steps") else made
            return made.prefetch(self.configuration.prefetch)

        is_shared = way in ("each", "loop of replicas")
        spread = self.strategy.distribute_datasets_from_function
        made = spread(make) if is_shared else make()
        if self.saves is not None:
            # Of before the first step: the first batch has been looked at.
            self.checkpoint.write(str(self.saves / "0"))
        return made

    def loop(self) -> None:
        """Loops of one's own."""
        made, model = self.made(steps=True), self.model
        while self.loader.epoch < self.configuration.most_epochs and not self.loader.is_over:
            for step, (x, y) in made:
                ys = self.strategy.experimental_local_results(y)
                self.rows.append([row for part in ys for row in part.numpy().tolist()])
                xs = self.strategy.experimental_local_results(x)
                with tf.GradientTape() as tape:
                    loss = tf.reduce_mean(tf.concat([model(part) for part in xs], 0))
                model.optimizer.apply_gradients(zip(
                    tape.gradient(loss, model.trainable_variables), model.trainable_variables,
                    strict=True,
                ))  # fmt: skip
                self.state.used.assign(step)
                self.note()

    def fit(self) -> None:
        """Keras."""
        c, loader, job = self.configuration, self.loader, self
        made = self.made()

        class Note(tf.keras.callbacks.Callback):
            def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
                job.note()

        def fit(initial: int, epochs: int, steps: int | None = None) -> None:
            self.model.fit(
                made, initial_epoch=initial, epochs=epochs, steps_per_epoch=steps, verbose=0,
                callbacks=[FeedCallback(self.state), Note()],
            )  # fmt: skip

        if c.way == "fit steps":
            begins, rest = divmod(loader.step, c.steps)
            if rest and begins + 1 < c.most_epochs:
                try:
                    fit(begins, c.most_epochs, c.steps)
                except feeder.ConfigError:
                    pass
                else:
                    raise AssertionError("fit went on in the middle of its epoch")
            if rest:
                fit(begins, begins + 1, c.steps - rest)
                begins += 1
            if begins < c.most_epochs:
                fit(begins, c.most_epochs, c.steps)
        elif c.way == "fit each":
            while loader.epoch < c.most_epochs:
                epoch, knows = loader.epoch, c.data.kind in ("map", "source", "length")
                fit(epoch, epoch + 1, loader.left if knows else None)
        elif loader.epoch < c.most_epochs:
            # Keras looks at a batch on replicas even if no epoch is left.
            fit(loader.epoch, c.most_epochs)


def check(c: Configuration, job: Job) -> None:
    """Whether the undisturbed run gave what it had to."""
    num = len(c.data.expected())
    each = strategy_of(c.way).num_replicas_in_sync if c.way in ("each", "loop of replicas") else 1
    # Batches that TensorFlow knows to be of one shape it gives to all replicas, or leaves them out.
    is_cut = c.way == "loop of replicas" and c.data.drop_last and not c.data.is_own
    batches = num * c.most_epochs if c.way != "fit steps" else c.steps * c.most_epochs
    steps = (num if is_cut else num + each - 1) // each * c.most_epochs
    steps = steps if c.way != "fit steps" else batches
    assert len(job.log) == steps == job.log[-1][1], (len(job.log), steps, job.log[-1])
    batches -= num % each * is_cut
    assert job.log[-1][0] == batches, (job.log[-1], batches)
    if c.way in ("loop", "repeat"):
        c.data.check(job.rows)


def differences(c: Configuration, folder: Path) -> tuple[int, list[str]]:
    """Run it, kill it at every step and resume it; the number of kills. Raises where it differs."""
    with c.data.served(folder) as server, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        whole = Job(c, server)
        whole.saves = folder
        whole.run()
        check(c, whole)
        for at in range(len(whole.log) + 1):
            rest = Job(c, server).run(str(folder / f"{at}")).log
            assert rest == whole.log[at:], f"resumed at {at}: {rest}, expected {whole.log[at:]}"
        return len(whole.log) + 1, []


if __name__ == "__main__":
    campaign(draw, differences, __doc__)
