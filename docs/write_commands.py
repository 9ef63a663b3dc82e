"""Writes what every command's --help says into commands.md: run by scripts/docs commands."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

PAGE = Path(__file__).with_name("commands.md")
_BLOCK = re.compile(
    r"^```sh\nfeeder (?P<words>[^\n]*--help)\n```\n\n```output\n.*?^```\n", re.MULTILINE | re.DOTALL
)


def help_block(words: str) -> str:
    """The block of a command, and that of what it prints."""
    done = subprocess.run(
        [sys.executable, "-m", "feeder", *words.split()],
        env=os.environ | {"COLUMNS": "80", "NO_COLOR": "1"},
        stdout=subprocess.PIPE, check=True, text=True,
    )  # fmt: skip
    return f"```sh\nfeeder {words}\n```\n\n```output\n{done.stdout.rstrip()}\n```\n"


def main() -> None:
    """Write the page anew."""
    text = PAGE.read_text(encoding="utf-8")
    PAGE.write_text(_BLOCK.sub(lambda found: help_block(found["words"]), text), encoding="utf-8")


if __name__ == "__main__":
    main()
