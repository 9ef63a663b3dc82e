"""`python -m feeder`."""

import sys

from feeder.cli import main

if __name__ == "__main__":
    sys.exit(main())
