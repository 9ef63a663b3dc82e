"""The states of a member as a diagram, from the table: `python -m simulation.diagram` prints it.

The README of `feeder/service/protocol` holds what this prints.
"""

from __future__ import annotations

from feeder.service.protocol.member import TABLE, State


def draw() -> str:
    """The table as a Mermaid diagram."""
    lines = ["stateDiagram-v2", f"    [*] --> {State.ABSENT.value}"]
    for state, moves in TABLE.items():
        targets: dict[str, list[str]] = {}
        for move, to in moves.items():
            targets.setdefault(to.value, []).append(move.value)
        for name, names in targets.items():
            lines.append(f"    {state.value} --> {name}: {', '.join(names)}")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    print(draw(), end="")
