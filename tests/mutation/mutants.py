"""The mutants of a module: small changes of its code, each of which some test should notice.

A mutant is a splice: a stretch of the file and the text that takes its place, so that all else of
the file, its lines included, stays. It is named by what it changes and where (file, definition, old
and new code, the how-manieth such place), not by its line: a sample that was drawn before other
code of the file moved can be drawn again. The operators are the usual ones (R. A. DeMillo et al.,
"Hints on Test Data Selection", 1978; those of mutmut and cosmic-ray); texts, annotations, logging
and the arguments of errors are left alone, for no test should pin their wording.
"""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from hashlib import blake2b
from itertools import islice

_LOGGING = {"debug", "info", "warning", "error", "exception", "log"}
_OTHER_COMPARISONS: dict[type[ast.cmpop], tuple[type[ast.cmpop], ...]] = {
    ast.Lt: (ast.LtE, ast.GtE),
    ast.LtE: (ast.Lt, ast.Gt),
    ast.Gt: (ast.GtE, ast.LtE),
    ast.GtE: (ast.Gt, ast.Lt),
    ast.Eq: (ast.NotEq,),
    ast.NotEq: (ast.Eq,),
    ast.Is: (ast.IsNot,),
    ast.IsNot: (ast.Is,),
    ast.In: (ast.NotIn,),
    ast.NotIn: (ast.In,),
}
_OTHER_OPERATORS: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Add,
    ast.FloorDiv: ast.Mod,
    ast.Mod: ast.FloorDiv,
    ast.BitOr: ast.BitAnd,
    ast.BitAnd: ast.BitOr,
}
_OTHER_FUNCTIONS = {"min": "max", "max": "min", "any": "all", "all": "any"}
_NOT_SWAPPED = {"cast", "getattr", "hasattr", "isinstance", "issubclass", "setattr"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Mutant:
    """One change of one file."""

    file: str
    """From the project's folder."""
    symbol: str
    """The definition that it is in, by its qualified name."""
    line: int
    kind: str
    start: int
    stop: int
    """The bytes of the file that `new` takes the place of."""
    old: str
    new: str
    place: int
    """How many such changes the definition has before this one."""

    @property
    def id(self) -> str:
        words = (self.file, self.symbol, self.kind, self.old, self.new, str(self.place))
        return blake2b("\0".join(words).encode(), digest_size=8).hexdigest()

    def apply(self, source: bytes) -> bytes:
        """Return the file with the change in it."""
        return source[: self.start] + self.new.encode() + source[self.stop :]


def sample(file: str, source: bytes, seed: str, num: int) -> list[Mutant]:
    """Return `num` mutants of a file: those of the smallest digests of the seed and their ids, so
    that a larger sample holds a smaller one."""

    def rank(mutant: Mutant) -> bytes:
        return blake2b(f"{seed} {mutant.id}".encode(), digest_size=8).digest()

    ranked = sorted(mutants(file, source), key=rank)
    return list(islice((one for one in ranked if _compiles(one.apply(source))), num))


def _compiles(source: bytes) -> bool:
    try:
        compile(source, "mutant", "exec")
    except SyntaxError:  # a name in a pattern, say, which no expression can be
        return False
    return True


def mutants(file: str, source: bytes) -> list[Mutant]:
    """Return all mutants of a file, in its order; a few are no Python."""
    found: list[Mutant] = []
    places: Counter[tuple[str, ...]] = Counter()
    starts = [0]
    for line in source.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    for symbol, node, kind, new in _changes(ast.parse(source)):
        start = starts[node.lineno - 1] + node.col_offset
        stop = starts[(node.end_lineno or 0) - 1] + (node.end_col_offset or 0)
        old, text = source[start:stop].decode(), ast.unparse(new)
        if isinstance(node, ast.expr) and not isinstance(new, (ast.Constant, ast.Name)):
            text = f"({text})"
        key = (symbol, kind, old, text)
        mutant = Mutant(
            file=file, symbol=symbol, line=node.lineno, kind=kind, start=start, stop=stop,
            old=old, new=text, place=places[key],
        )  # fmt: skip
        places[key] += 1
        found.append(mutant)
    return found


_Node = ast.expr | ast.stmt


def _changes(tree: ast.Module) -> Iterator[tuple[str, _Node, str, _Node]]:
    """Yield (symbol, node, kind of change, what takes the node's place)."""

    def visit(node: ast.AST, symbol: str) -> Iterator[tuple[str, _Node, str, _Node]]:
        if _is_left_alone(node):
            return
        for kind, vary in _OPERATORS.items():
            for old, new in vary(node):
                if ast.dump(new) != ast.dump(old):  # such as two equal arguments, swapped
                    yield symbol, old, kind, new
        if isinstance(node, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            symbol = f"{symbol}.{node.name}".lstrip(".")
        for child in _parts(node):
            yield from visit(child, symbol)

    return visit(tree, "")


def _parts(node: ast.AST) -> Iterator[ast.AST]:
    """Yield what lies in a node, without annotations and decorators."""
    for name, value in ast.iter_fields(node):
        if name in ("annotation", "returns", "decorator_list", "bases", "type_params"):
            continue
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST):
                yield child


def _is_left_alone(node: ast.AST) -> bool:
    match node:
        case ast.Assert() | ast.JoinedStr() | ast.Import() | ast.ImportFrom():
            return True
        case ast.Expr(value=ast.Constant()):  # a docstring
            return True
        case ast.If(test=ast.Name(id="TYPE_CHECKING")):
            return True
        case ast.Call(func=ast.Attribute(value=ast.Name(id=name), attr=attr)):
            return attr in _LOGGING and "log" in name.lower()
        case ast.Call(func=ast.Name(id=name)):
            return name.endswith(("Error", "Timeout", "TypeVar"))
    return False


# Each operator yields what it replaces of a node, and by what.
_Pairs = Iterator[tuple[_Node, _Node]]


def _delete(node: ast.AST) -> _Pairs:
    match node:
        case ast.Expr(value=ast.Call() as call) if not _is_left_alone(call):
            yield node, ast.Pass()
        case ast.Assign(targets=[ast.Attribute() | ast.Subscript()]) | ast.AugAssign():
            yield node, ast.Pass()
        case ast.Raise() | ast.Break() | ast.Continue() | ast.Return(value=None):
            yield node, ast.Pass()
        case ast.Return(value=ast.Constant(value=None)):
            pass
        case ast.Return():
            yield node, ast.Pass()


def _negate(node: ast.AST) -> _Pairs:
    match node:
        case ast.While(test=ast.Constant()):
            tests = []
        case ast.If(test=test) | ast.While(test=test) | ast.IfExp(test=test):
            tests = [test]
        case ast.comprehension(ifs=tests):
            pass
        case _:
            return
    for test in tests:
        yield test, ast.UnaryOp(ast.Not(), test)


def _compare(node: ast.AST) -> _Pairs:
    if isinstance(node, ast.Compare):
        for i, operator in enumerate(node.ops):
            for other in _OTHER_COMPARISONS[type(operator)]:
                ops = [*node.ops[:i], other(), *node.ops[i + 1 :]]
                yield node, ast.Compare(node.left, ops, node.comparators)


def _logic(node: ast.AST) -> _Pairs:
    match node:
        case ast.BoolOp(op=op, values=values):
            yield node, ast.BoolOp(ast.Or() if isinstance(op, ast.And) else ast.And(), values)
            for i in range(len(values)):
                left = [*values[:i], *values[i + 1 :]]
                yield node, left[0] if len(left) == 1 else ast.BoolOp(op, left)
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            yield node, operand


def _arithmetic(node: ast.AST) -> _Pairs:
    match node:
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _OTHER_OPERATORS:
            if not (_is_sequence(left) or _is_sequence(right)):
                yield node, ast.BinOp(left, _OTHER_OPERATORS[type(op)](), right)
        case ast.AugAssign(target=target, op=op, value=value) if type(op) in _OTHER_OPERATORS:
            if not _is_sequence(value):
                yield node, ast.AugAssign(target, _OTHER_OPERATORS[type(op)](), value)


def _constant(node: ast.AST) -> _Pairs:
    match node:
        case ast.Constant(value=bool(value)):
            yield node, ast.Constant(not value)
        case ast.Constant(value=int(value)):
            yield node, ast.Constant(value + 1)
            if value > 0:
                yield node, ast.Constant(value - 1)
        case ast.Constant(value=float(value)):
            yield node, ast.Constant(2 * value + 1)


def _function(node: ast.AST) -> _Pairs:
    match node:
        case ast.Call(func=ast.Name(id=name)) if name in _NOT_SWAPPED:
            pass
        case ast.Call(func=ast.Name(id=name)) if name in _OTHER_FUNCTIONS:
            yield node, ast.Call(ast.Name(_OTHER_FUNCTIONS[name]), node.args, node.keywords)
        case ast.Call(func=ast.Name(id="sorted"), args=[_], keywords=[]):
            yield node, ast.Call(ast.Name("list"), node.args, [])
        case ast.Call(args=args):
            for i in range(len(args) - 1):
                if all(isinstance(x, (ast.Attribute, ast.Name)) for x in args[i : i + 2]):
                    swapped = [*args[:i], args[i + 1], args[i], *args[i + 2 :]]
                    yield node, ast.Call(node.func, swapped, node.keywords)


_OPERATORS: dict[str, Callable[[ast.AST], _Pairs]] = {
    "delete": _delete,
    "negate": _negate,
    "compare": _compare,
    "logic": _logic,
    "arithmetic": _arithmetic,
    "constant": _constant,
    "function": _function,
}


def _is_sequence(node: ast.expr) -> bool:
    match node:
        case ast.List() | ast.Tuple() | ast.JoinedStr() | ast.Constant(value=str() | bytes()):
            return True
    return False
