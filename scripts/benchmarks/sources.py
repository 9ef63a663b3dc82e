"""The ready-made sources, measured in one process against what they must reach.

Batches of Caffe LMDBs are delivered by the feeder and, where nvidia-dali is installed, by DALI's
reader of the same files; records that cost little are taken by feeds and by plain loops, which
stack them; feeds are resumed far into every order; sources put together are resumed and packed, and
Parquet files read, beside Grain, pyarrow and Hugging Face's datasets where these are installed;
JPEGs are decoded on one thread and on two. Contenders take turns within each repetition; medians
are printed with the lowest and the highest sample.
"""

from __future__ import annotations

from functools import partial

import cheap
import steps
from command import Cases, run_cases
from far import resuming
from jpegs import decoding
from lmdbs import DATUMS, reading

CASES: Cases = {
    **{datums.case: partial(reading, datums) for datums in DATUMS},
    **cheap.CASES,
    **steps.CASES,
    "resume": resuming,
    "jpeg": decoding,
}

if __name__ == "__main__":
    run_cases("sources", __doc__, CASES)
