"""Ready-made sources: passed to `init_data_input_workers` where a fetch function is.

`caffe_lmdb` and `caffe2_lmdb` need the extra `lmdb`, and whatever decodes image files the extra
`images`; neither is imported before such a source is made.
"""

from feeder.workers.sources import *  # noqa: F403
from feeder.workers.sources import __all__ as __all__
