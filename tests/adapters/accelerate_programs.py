"""Random loops with Accelerate: killed at every step and resumed, they go on as if nothing had
been. With PyTorch's loader the undisturbed loop is the same."""

from __future__ import annotations

import dataclasses
import random
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

with warnings.catch_warnings():
    # What the libraries' own imports say is not ours.
    warnings.simplefilter("ignore")
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState, GradientState, PartialState
    from accelerate.utils import DataLoaderConfiguration, set_seed

from adapters.campaigns import campaign, first_difference, resume_all
from adapters.loaders import Source, draw_source


@dataclasses.dataclass(frozen=True)
class Loop:
    """A script."""

    source: Source
    epochs: int
    accumulate: int
    dispatch: bool | None
    is_seedable: bool
    leaves_at: int | None


def draw_loop(rng: random.Random) -> Loop:
    """A random one."""
    pick = rng.choice
    return Loop(
        draw_source(rng, "feeder"), pick((1, 2, 3)), pick((1, 1, 2, 3)),
        pick((None, None, True, False)), pick((False, True)), pick((None, None, 2)),
    )  # fmt: skip


class Steps:
    """What a script counts."""

    num = 0

    def state_dict(self) -> dict[str, int]:
        return {"num": self.num}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.num = state["num"]


def run(loop: Loop, folder: Path, *, name: str = "feeder", seed: int = 1,
        resume: Path | None = None) -> tuple[list[Any], list[tuple[Path, int]]]:  # fmt: skip
    """The log of a loop, and what it saved."""
    for state in (AcceleratorState, GradientState, PartialState):
        state._reset_state()
    set_seed(seed)
    accelerator = Accelerator(
        cpu=True, gradient_accumulation_steps=loop.accumulate,
        dataloader_config=DataLoaderConfiguration(
            dispatch_batches=loop.dispatch, use_seedable_sampler=loop.is_seedable, data_seed=3
        ),
    )  # fmt: skip
    net = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.5)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.9)
    loader = loop.source.make(name, seed)
    net, optimizer, schedule, loader = accelerator.prepare(net, optimizer, schedule, loader)
    steps = Steps()
    accelerator.register_for_checkpointing(steps)
    if resume is not None:
        accelerator.load_state(str(resume))
    log: list[Any] = []
    kills: list[tuple[Path, int]] = []
    rounds = 0
    # Accelerate does not count an epoch without a batch.
    while loader.iteration < loop.epochs and rounds < 2 * loop.epochs + 2:
        rounds += 1
        for batch in loader:
            with accelerator.accumulate(net):
                total = (batch.sum() / 1000 + torch.rand(())).reshape(1, 1)
                accelerator.backward((net(total) - 1).square().mean())
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
            gathered = accelerator.gather_for_metrics(batch)
            log.append((loader.iteration, gathered.tolist(), optimizer.param_groups[0]["lr"],
                        accelerator.sync_gradients))  # fmt: skip
            steps.num += 1
            # The gradients of a group that is not complete are in no checkpoint.
            if accelerator.sync_gradients and name == "feeder" and resume is None:
                path = folder / str(len(kills))
                accelerator.save_state(str(path))
                kills.append((path, len(log)))
            if steps.num == loop.leaves_at:
                break
    return [*log, [weight.tolist() for weight in net.parameters()]], kills


def differences(loop: Loop, folder: Path) -> tuple[int, list[str]]:
    """How often it was killed, and where it went on differently."""
    found = []
    try:
        want, kills = run(loop, folder)
    except ValueError:
        # Accelerate's, of a rank without a batch.
        with pytest.raises(ValueError):
            run(loop, folder, name="torch")
        return 0, []
    if not loop.source.differs:
        theirs, _ = run(loop, folder, name="torch")
        if want != theirs:
            found.append(f"not as PyTorch's: {first_difference(want, theirs)}")
    # A state of a loop that is left is one in this loop, as of any DataLoader.
    kills = [(path, at) for path, at in kills if at != loop.leaves_at]
    found += resume_all(kills, want, lambda path, to: run(loop, to, seed=77, resume=path)[0])
    return len(kills), found


if __name__ == "__main__":
    campaign(draw_loop, differences, __doc__)
