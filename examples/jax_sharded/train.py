"""Trains on all devices, and goes on where it was killed:

XLA_FLAGS=--xla_force_host_platform_device_count=4 python examples/jax_sharded/train.py job.json
"""

import json
import os
import sys

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from feeder.adapters.jax import FeedLoader, global_batches


class Circles:  # points, and whether each lies in a circle
    def __len__(self):
        return 1000

    def __getitem__(self, i):
        point = np.random.default_rng(i).uniform(-1, 1, 2).astype(np.float32)
        return point, np.float32(np.hypot(*point) < 0.8)


@jax.jit
def train(weights, points, inside):
    def loss_of(weights):
        logits = jnp.tanh(points @ weights[:2] + weights[2]) @ weights[3]
        return jnp.mean(jnp.logaddexp(0, logits) - inside * logits)

    loss, slope = jax.value_and_grad(loss_of)(weights)
    return weights - 0.3 * slope, loss


def main(path, stop_at=None):
    rows = NamedSharding(Mesh(np.array(jax.devices()), ("rows",)), PartitionSpec("rows"))
    loader = FeedLoader(Circles(), batch_size=20, shuffle=True, epochs=2)  # of this process
    batches = global_batches(loader, rows, ahead=2)
    weights = jax.random.normal(jax.random.key(0), (4, 16))
    if os.path.exists(path):
        with open(path) as file:
            job = json.load(file)
        weights = jnp.array(job["weights"], jnp.float32)
        batches.set_state(job["feed"])
    for step, (points, inside) in enumerate(batches):
        weights, loss = train(weights, points, inside)
        if step % 10 == 9:
            with open(path + ".new", "w") as file:
                json.dump({"weights": weights.tolist(), "feed": batches.get_state()}, file)
            os.replace(path + ".new", path)
        if step + 1 == stop_at:
            break
    print(f"loss {loss:.9f}, weights {jnp.linalg.norm(weights):.9f}")


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:]))
