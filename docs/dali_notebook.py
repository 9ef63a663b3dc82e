# %% [markdown]
# # Rotated pictures, interrupted and resumed
#
# DALI's notebook on checkpointing reads a folder of JPEGs, rotates each by a random angle, saves a
# checkpoint after a few batches and goes on from it in a second pipeline. This is the same with
# feeder: shuffled pictures, a random angle for each between −30° and 30°, a snapshot after three
# batches, and then a *fresh process* that goes on with the same labels, angles and pixels. The work
# is done on the CPU.
#
# `rotated.py`, beside this notebook, makes the feed:

# %%
import subprocess
import sys
import tempfile
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np

import feeder
import rotated

print(Path(rotated.__file__).read_text())

# %% [markdown]
# ## Three batches, then a snapshot
#
# The folder holds twelve pictures in four classes, so an epoch has four batches of three, and the
# snapshot is taken inside the first one.

# %%
folder = Path(tempfile.mkdtemp())
coordinator = rotated.make_feed()
classes = sorted(path.name for path in rotated.PICTURES.iterdir() if path.is_dir())


def show(images, labels, angles, title):
    """One row of pictures per batch."""
    figure, axes = plt.subplots(*labels.shape, figsize=(6, 2.1 * len(labels)), squeeze=False)
    for axis, image, label, angle in zip(
        axes.flat, np.concatenate(images), labels.flat, angles.flat, strict=True
    ):
        axis.imshow(image)
        axis.set_title(f"{classes[label]} {angle:+.1f}°", fontsize=9)
        axis.axis("off")
    figure.suptitle(title)
    figure.tight_layout()
    plt.show()


with coordinator:
    feed = coordinator["train"]
    before = [next(feed) for _ in range(3)]
    snapshot = coordinator.snapshot()
    snapshot.write(folder / "snapshot")
    after = list(feed)

print(snapshot.describe())
for batch in before + after:
    names = [classes[label] for label in batch["label"]]
    angles = ", ".join(f"{angle:+.2f}°" for angle in batch["angle"])
    print(f"batch {batch.step}, epoch {batch.epoch}: {', '.join(names)}: {angles}")

# %%
show(
    *(np.stack([batch[name] for batch in before]) for name in rotated.NAMES), "before the snapshot"
)

# %% [markdown]
# These batches come after the snapshot. The second epoch brings the pictures in another order,
# rotated by other angles:

# %%
went_on = {name: np.stack([batch[name] for batch in after]) for name in rotated.NAMES}
show(*went_on.values(), "after the snapshot, without an interruption")

# %% [markdown]
# ## A fresh process goes on
#
# It knows `rotated.py` and the file with the snapshot, nothing else.

# %%
subprocess.run(
    [sys.executable, rotated.__file__, folder / "snapshot", folder / "rest.npz"], check=True
)
with np.load(folder / "rest.npz") as file:
    resumed = dict(file)

for name in rotated.NAMES:
    same = went_on[name].tobytes() == resumed[name].tobytes()
    print(f"{name}: {went_on[name].dtype} {went_on[name].shape}, equal bit for bit: {same}")
    assert same

# %%
show(*resumed.values(), "after the snapshot, in a fresh process")

# %% [markdown]
# ## What does not fit is refused
#
# A feed that would bring other batches does not take the snapshot, and says why.

# %%
pictures = feeder.sources.image_folder(rotated.PICTURES, random_shuffle=True, num_shards=2)
try:
    feeder.init_data_input_workers(
        rotated.NAMES, rotated.Rotated(pictures), rotated.BATCH_SIZE, epochs=2, seed=7,
        resume=snapshot, coordinator=feeder.Coordinator(),
    )  # fmt: skip
except feeder.ResumeError as error:
    print(error)
