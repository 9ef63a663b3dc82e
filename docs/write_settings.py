"""Writes the tables of settings.md from signatures and docstrings: run by scripts/docs settings."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import feeder
from feeder.settings import Parameter, parameters

PAGE = Path(__file__).with_name("settings.md")
_TABLE = re.compile(
    r"(?P<head>^## (?P<function>\w+)\n(?:(?!## |\|).*\n)*)\| setting \|.*\n(?:\|.*\n)*",
    re.MULTILINE,
)
_PAGE = re.compile(r"docs/(?P<to>(?P<name>[\w-]+)\.md[\w#-]*)")


def written(text: str) -> str:
    """The page with its tables anew: each is of the function of `feeder` that it stands under."""

    def with_table(found: re.Match[str]) -> str:
        settings = parameters(getattr(feeder, found["function"])).values()
        head = f"{found['head']}| setting | default | |\n|---|---|---|\n"
        return head + "".join(map(row, settings))

    return _TABLE.sub(with_table, text)


def row(setting: Parameter) -> str:
    """A setting's row; where its line names a page, there is a link."""
    default = "" if setting.default is inspect.Parameter.empty else f" `{setting.default!r}`"
    line = _PAGE.sub(r"[\g<name>](\g<to>)", setting.line).replace("|", "\\|")
    return f"| `{setting.name}` |{default} | {line} |\n"


def main() -> None:
    """Write the page anew."""
    PAGE.write_text(written(PAGE.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
