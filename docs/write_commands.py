"""Writes what every command's --help says into commands.md: run by scripts/docs commands.

Dots take the place of `--help`, and of options that `feeder serve` has in the same words.
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
_OPTION = re.compile(r"^  -[^\n]*\n(?:   [^\n]*\n)*", re.MULTILINE)


@cache
def help_of(words: str) -> str:
    """What a command prints."""
    done = subprocess.run(
        [sys.executable, "-m", "feeder", *words.split()],
        env=os.environ | {"COLUMNS": "80", "NO_COLOR": "1"},
        stdout=subprocess.PIPE, check=True, text=True,
    )  # fmt: skip
    return done.stdout


def shortened(words: str) -> str:
    """What a command prints, with dots for what every command has and for what is of `serve`."""
    known = set() if words == "serve --help" else set(_OPTION.findall(help_of("serve --help")))

    def dotted(found: re.Match[str]) -> str:
        return "  ...\n" if found[0] in known or found[0].startswith("  -h, ") else found[0]

    text = re.sub(r"(?:  \.\.\.\n)+", "  ...\n", _OPTION.sub(dotted, help_of(words)))
    if known and "[--bind ADDR]" in text:
        text = re.sub(r" \[-h\] \[--bind ADDR\].*?\n(?=\n)", " ... FILE\n", text, flags=re.DOTALL)
    return text


def help_block(words: str) -> str:
    """The block of a command, and that of what it prints."""
    return f"```sh\nfeeder {words}\n```\n\n```output\n{shortened(words).rstrip()}\n```\n"


def main() -> None:
    """Write the page anew."""
    text = PAGE.read_text(encoding="utf-8")
    PAGE.write_text(_BLOCK.sub(lambda found: help_block(found["words"]), text), encoding="utf-8")


if __name__ == "__main__":
    main()
