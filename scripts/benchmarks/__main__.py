"""`scripts/bench NAME`: finds the load of that name, or `pair`, and hands it its arguments."""

import importlib
import sys

if __name__ == "__main__":
    name, *arguments = sys.argv[1:]
    sys.exit(importlib.import_module(f"benchmarks.{name}").main(arguments))
