"""Three sets of texts that Python ships, tokenised, mixed by a schedule, and packed."""

import builtins
import inspect
import pydoc
from pydoc_data import topics

import numpy as np

import feeder
from feeder import sources

NAMES = ["tokens", "segment_ids", "positions", "loss_mask"]


def texts():
    """A manual, code, and short answers: the same for every run of one Python."""
    manual = list(topics.topics.values())
    code = inspect.getsource(pydoc).split("\ndef ")
    answers = [thing.__doc__ for _, thing in sorted(vars(builtins).items()) if thing.__doc__]
    return {"manual": manual, "code": code, "answers": answers}


def tokenise(text):
    return np.frombuffer(text.encode(), np.uint8).astype(np.int32) + 1


def mixture():
    weights = {"manual": 0.5, "code": 0.4, "answers": 0.1}
    parts = {
        name: (sources.records(of).map(tokenise).shuffle(), weights[name])
        for name, of in texts().items()
    }
    return sources.mix(
        parts,
        schedule=[(200, {"manual": 0.2, "code": 0.4, "answers": 0.4})],
        on_exhausted="repeat",
    )


def packed():
    return sources.pack(mixture(), seq_len=512, window=64)


def make(ranks=1, resume=None, **settings):
    return feeder.init_data_input_workers(
        NAMES,
        packed(),
        batch_size=4,
        devices=ranks,
        epochs=None,
        seed=7,
        resume=resume,
        coordinator=feeder.Coordinator(),
        **settings,
    )
