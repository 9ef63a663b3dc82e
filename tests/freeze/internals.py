"""The only place that knows where the frozen things live that are no public names."""

from __future__ import annotations

from feeder.cli import main as run_command
from feeder.service.protocol.coding import decode, encode
from feeder.service.protocol.messages import FROM_CONSUMER, FROM_SERVER

__all__ = ["FROM_CONSUMER", "FROM_SERVER", "decode", "encode", "run_command"]
