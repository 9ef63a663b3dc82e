"""PyTorch: `DataLoader`, PyTorch's own with a state; `FeedLoader`, one order for all ranks.

```python
from feeder.adapters.torch import DataLoader
```
"""

from feeder.adapters.torch.feed_loader import FeedLoader
from feeder.adapters.torch.loader import DataLoader

__all__ = ["DataLoader", "FeedLoader"]
