"""The states of a member as a diagram, from the table: `python -m simulation.diagram` prints it.

The README of `feeder/service/protocol` holds what this prints.
"""

from __future__ import annotations

from feeder.service.protocol.membership import TABLE, Move, State


def draw() -> str:
    """The table as a Mermaid diagram."""
    lines = ["stateDiagram-v2", f"    [*] --> {State.ABSENT.value}"]
    for state, moves in TABLE.items():
        targets: dict[str, list[str]] = {}
        for move, to in moves.items():
            for one in to_states(to):
                targets.setdefault(one.value, []).append(move.value)
        for name, names in targets.items():
            lines.append(f"    {state.value} --> {name}: {', '.join(names)}")
    return "\n".join(lines) + "\n"


def to_states(to: State | None) -> list[State]:
    """The states that a move may lead to; None is the one in which a lease ran out."""
    return [state for state in TABLE if Move.HANGS in TABLE[state]] if to is None else [to]


if __name__ == "__main__":
    print(draw(), end="")
