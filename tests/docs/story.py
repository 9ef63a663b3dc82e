"""Doing what a page says: its blocks in order, in a folder of their own."""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import feeder.cli
from docs.pages import DATA, ROOT, Block

LIMIT_S = 50.0
TOOLS = {"cat", "cd", "cp", "docker", "echo", "kill", "kubectl", "ls", "pip", "python", "sbatch",
         "srun", "sudo", "systemctl", "torchrun", "wait"}  # fmt: skip
"""Commands that pages may name beside the project's own."""


class Story:
    """The blocks of one page, done one after the other."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.names: dict[str, Any] = {}
        self.printed = ""
        self._prepare()

    def _prepare(self) -> None:
        """The command `feeder`, as a reader has it."""
        (self.folder / "bin").mkdir()
        command = self.folder / "bin/feeder"
        command.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m feeder "$@"\n')
        command.chmod(0o755)

    def environment(self) -> dict[str, str]:
        """What commands are started with."""
        path = [str(self.folder / "bin"), str(Path(sys.executable).parent), os.environ["PATH"]]
        return {
            **os.environ,
            "PATH": os.pathsep.join(path),
            "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path]),
            "COLUMNS": "80",
            "NO_COLOR": "1",
        }

    def do(self, block: Block) -> None:
        """What a block asks for."""
        match block.language:
            case "python" if block.why_not is not None:
                compile(block.code, str(block.page), "exec")
            case "python":
                self.python(block)
            case "sh" if block.why_not is not None:
                self.printed = ""
                for words in commands(block.code):
                    check_command(words)
            case "sh":
                self.sh(block)
            case "output":
                assert is_output(block.code, self.printed), (
                    f"{block}: the block before it printed\n{self.printed}"
                )
            case language if language in DATA:
                parse(language, block.code)
            case language:
                assert language == "text", f"{block}: no language {language!r}"
        if block.title is not None:
            (self.folder / block.title).write_text(block.code)

    def python(self, block: Block) -> None:
        """Execute a block, in the names of those before it where it does not begin anew."""
        if re.match(r"(#[^\n]*\n)*(import|from) ", block.code):
            self.names = {"__name__": "page"}
        code = compile("\n" * (block.line - 1) + block.code, str(block.page), "exec")
        output = io.StringIO()
        with contextlib.redirect_stdout(output):
            exec(code, self.names)
        self.printed = output.getvalue()

    def sh(self, block: Block) -> None:
        """Run a block by bash; all its commands have to succeed."""
        done = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", block.code],
            cwd=self.folder, env=self.environment(), timeout=LIMIT_S,
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )  # fmt: skip
        self.printed = done.stdout
        assert done.returncode == 0, f"{block}: exit status {done.returncode}\n{done.stdout}"


def is_output(wanted: str, printed: str) -> bool:
    """Whether something was printed that a block of output stands for."""
    parts = [r"\s+".join(map(re.escape, part.split())) for part in wanted.split("...")]
    pattern = r"\s*" + r"\s*.*?\s*".join(parts) + r"\s*"
    return re.fullmatch(pattern, printed, re.DOTALL) is not None


def parse(language: str, text: str) -> Any:
    """What a block of data holds."""
    if language == "yaml":
        import yaml

        return list(yaml.safe_load_all(text))
    return tomllib.loads(text) if language == "toml" else json.loads(text)


def commands(code: str) -> list[list[str]]:
    """The words of each command of a block that is not run."""
    lines = code.replace("\\\n", " ").splitlines()
    found = [shlex.split(line, comments=True) for line in lines]
    found = [words[:-1] if words[-1:] == ["&"] else words for words in found]
    while any(words and "=" in words[0] for words in found):
        found = [words[1:] if words and "=" in words[0] else words for words in found]
    return [words for words in found if words]


def check_command(words: list[str]) -> None:
    """A command is there, and understands its arguments."""
    name, *arguments = words
    if name == "feeder":
        feeder_understands(arguments)
    elif name.startswith("scripts/"):
        assert os.access(ROOT / name, os.X_OK), f"there is no {name}"
        if name == "scripts/bench" and arguments:
            bench = arguments[0]
            folders = ROOT / f"scripts/benchmarks/{bench}.py", ROOT / f"scripts/{bench}/__main__.py"
            assert any(path.exists() for path in folders), f"there is no bench {bench!r}"
    else:
        assert name in TOOLS or shutil.which(name), f"there is no command {name!r}"


def feeder_understands(arguments: list[str]) -> None:
    """Parse the arguments of `feeder`; wrong ones exit."""
    if arguments[:1] == ["demo"]:
        import demo

        demo.parse_options(arguments[1:])
    else:
        feeder.cli._make_parser(arguments[:1]).parse_args(arguments)
