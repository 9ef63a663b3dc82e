"""Writes what every command's --help says into commands.md: run by scripts/docs commands.

An option that `feeder serve` has in the same words is told there alone; dots take its place.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from functools import cache
from pathlib import Path

PAGE = Path(__file__).with_name("commands.md")
_BLOCK = re.compile(
    r"^```sh\nfeeder (?P<words>[^\n]*--help)\n```\n\n```output\n.*?^```\n", re.MULTILINE | re.DOTALL
)
_OPTION = re.compile(r"^  --[^\n]*\n(?:   [^\n]*\n)*", re.MULTILINE)


@cache
def help_of(words: str) -> str:
    """What a command prints."""
    done = subprocess.run(
        [sys.executable, "-m", "feeder", *words.split()],
        env=os.environ | {"COLUMNS": "80", "NO_COLOR": "1"},
        stdout=subprocess.PIPE, check=True, text=True,
    )  # fmt: skip
    return done.stdout


def without_options_of_serve(text: str) -> str:
    """A help text, with dots for the options that `feeder serve` has."""
    known = set(_OPTION.findall(help_of("serve --help")))
    dotted = _OPTION.sub(lambda found: "  ...\n" if found[0] in known else found[0], text)
    return re.sub(r"(?:  \.\.\.\n)+", "  ...\n", dotted)


def help_block(words: str) -> str:
    """The block of a command, and that of what it prints."""
    text = help_of(words)
    if words != "serve --help":
        text = without_options_of_serve(text)
    return f"```sh\nfeeder {words}\n```\n\n```output\n{text.rstrip()}\n```\n"


def main() -> None:
    """Write the page anew."""
    text = PAGE.read_text(encoding="utf-8")
    PAGE.write_text(_BLOCK.sub(lambda found: help_block(found["words"]), text), encoding="utf-8")


if __name__ == "__main__":
    main()
