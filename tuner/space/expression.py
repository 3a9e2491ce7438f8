"""Conditions and rules: a small language, parsed with `ast` and walked by hand; nothing is ever `eval`ed.

Numbers, strings, booleans and lists; names of parameters and of `engine.args` (`env.NAME` for a variable);
`== != < <= > >=`, `in`, `not in`; `and`, `or`, `not`; `+ - * / // % **`; parentheses.

A parameter whose own condition does not hold is inactive. Arithmetic with it is inactive too, a comparison with it is
false, and so is a name or a whole expression that comes to nothing else.
"""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from tuner.records import Setting

MAX_LENGTH = 2000
MAX_DEPTH = 50
MAX_MAGNITUDE = 10**30
"""Numbers beyond this, either way, are a mistake in the file and not a setting."""


class ExpressionError(ValueError):
    """The text is not an expression of this language, or cannot be evaluated with these values."""


class _Inactive:
    """The value of a parameter that is not in play."""

    def __repr__(self) -> str:
        return "inactive"


INACTIVE = _Inactive()

Value = Setting | list[Any] | _Inactive

_ARITHMETIC: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
}
_SYMBOLS = {ast.Add: "+", ast.Sub: "-", ast.Mult: "*", ast.Div: "/", ast.FloorDiv: "//", ast.Mod: "%", ast.Pow: "**"}
_ORDER: dict[type[ast.cmpop], Callable[[Any, Any], bool]] = {
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
}


@dataclass(frozen=True)
class Expression:
    """A parsed condition. `names` are the parameters and arguments that it mentions, in order of appearance."""

    text: str
    names: tuple[str, ...]
    _tree: ast.expr

    def holds(self, values: Mapping[str, Setting]) -> bool:
        """Whether it is true; a name that is not in `values` is inactive.

        Raises:
            ExpressionError: the values do not fit, for instance a text compared with a number by `<`.
        """
        return _truth(_evaluate(self._tree, values))

    def __hash__(self) -> int:
        return hash(self.text)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Expression) and self.text == other.text


def parse(text: str) -> Expression:
    """The expression that `text` writes.

    Raises:
        ExpressionError: with what is not understood and, where there is one, what to write instead.
    """
    if len(text) > MAX_LENGTH:
        raise ExpressionError(f"is longer than {MAX_LENGTH} characters")
    try:
        tree = ast.parse(text.strip(), mode="eval").body
    except (SyntaxError, ValueError, MemoryError, RecursionError) as error:
        raise ExpressionError(f"is not a condition: {_syntax_hint(text, error)}") from None
    names: dict[str, None] = {}
    _check(tree, names, 0)
    return Expression(text.strip(), tuple(names), tree)


def _syntax_hint(text: str, error: BaseException) -> str:
    if "&&" in text or "||" in text or "!" in text.replace("!=", ""):
        return "write 'and', 'or' and 'not' instead of '&&', '||' and '!'"
    if "=" in text and not any(sign in text for sign in ("==", "!=", "<=", ">=")):
        return "write '==' to compare, not '='"
    if isinstance(error, SyntaxError) and error.msg:
        return error.msg
    return "it cannot be parsed"


def _check(node: ast.AST, names: dict[str, None], depth: int) -> None:
    """Refuses whatever is not on the list, and collects names."""
    if depth > MAX_DEPTH:
        raise ExpressionError(f"is nested more than {MAX_DEPTH} deep")
    if isinstance(node, ast.Name):
        names[node.id] = None
        return
    if isinstance(node, ast.Attribute):
        names[_env_name(node)] = None
        return
    if isinstance(node, ast.Constant):
        if not isinstance(node.value, (bool, int, float, str)):
            raise ExpressionError(f"{ast.unparse(node)} is not a number, text or boolean")
        if not isinstance(node.value, str):
            _bounded(node.value)
        return
    allowed = (
        isinstance(node, (ast.BoolOp, ast.Compare, ast.List, ast.Tuple))
        or (isinstance(node, ast.BinOp) and type(node.op) in _ARITHMETIC)
        or (isinstance(node, ast.UnaryOp) and isinstance(node.op, (ast.Not, ast.USub, ast.UAdd)))
    )
    if not allowed:
        raise ExpressionError(f"'{ast.unparse(node)}' is not part of the language of conditions")
    if isinstance(node, ast.Compare) and any(isinstance(op, (ast.Is, ast.IsNot)) for op in node.ops):
        raise ExpressionError("write '==' or '!=' instead of 'is'")
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.expr):
            _check(child, names, depth + 1)


def _env_name(node: ast.Attribute) -> str:
    if isinstance(node.value, ast.Name) and node.value.id == "env":
        return f"env.{node.attr}"
    raise ExpressionError(f"'{ast.unparse(node)}' is not part of the language of conditions (only env.NAME has a dot)")


def _evaluate(node: ast.expr, values: Mapping[str, Setting]) -> Value:
    match node:
        case ast.Constant(value=value):
            return value  # type: ignore[return-value]
        case ast.Name(id=name):
            return values.get(name, INACTIVE)
        case ast.Attribute():
            return values.get(_env_name(node), INACTIVE)
        case ast.List(elts=items) | ast.Tuple(elts=items):
            return [_evaluate(item, values) for item in items]
        case ast.BoolOp(op=ast.And(), values=parts):
            return all(_truth(_evaluate(part, values)) for part in parts)
        case ast.BoolOp(values=parts):
            return any(_truth(_evaluate(part, values)) for part in parts)
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            return not _truth(_evaluate(operand, values))
        case ast.UnaryOp(op=op, operand=operand):
            inner = _evaluate(operand, values)
            if inner is INACTIVE:
                return INACTIVE
            return -_number(inner) if isinstance(op, ast.USub) else _number(inner)
        case ast.BinOp(left=left, op=op, right=right):
            return _arithmetic(op, _evaluate(left, values), _evaluate(right, values))
        case ast.Compare(left=left, ops=ops, comparators=comparators):
            operands = [_evaluate(part, values) for part in (left, *comparators)]
            return all(_compare(op, a, b) for op, a, b in zip(ops, operands, operands[1:], strict=False))
        case _:  # _check has refused all else
            raise ExpressionError(f"'{ast.unparse(node)}' is not part of the language of conditions")


def _truth(value: Value) -> bool:
    return value is not INACTIVE and bool(value)


def _number(value: Value) -> int | float:
    if isinstance(value, (bool, int, float)):
        return value
    raise ExpressionError(f"{_shown(value)} is not a number")


def _bounded(value: int | float) -> int | float:
    if isinstance(value, complex) or value != value or abs(value) > MAX_MAGNITUDE:
        raise ExpressionError("a number leaves the range of ±1e30")
    return value


def _arithmetic(op: ast.operator, left: Value, right: Value) -> Value:
    if left is INACTIVE or right is INACTIVE:
        return INACTIVE
    a, b = _number(left), _number(right)
    # A power is bounded before it is computed: 9**9**9 would otherwise take all memory.
    if isinstance(op, ast.Pow) and abs(a) > 1 and abs(b) * len(str(int(abs(a)))) > 200:
        raise ExpressionError("a number leaves the range of ±1e30")
    try:
        return _bounded(_ARITHMETIC[type(op)](a, b))
    except ZeroDivisionError:
        raise ExpressionError(f"{a} {_SYMBOLS[type(op)]} {b} divides by zero") from None
    except OverflowError:
        raise ExpressionError("a number leaves the range of ±1e30") from None


def _compare(op: ast.cmpop, left: Value, right: Value) -> bool:
    if isinstance(op, (ast.In, ast.NotIn)):
        return _membership(op, left, right)
    if left is INACTIVE or right is INACTIVE:
        return False
    if isinstance(op, ast.Eq):
        return _same(left, right)
    if isinstance(op, ast.NotEq):
        return not _same(left, right)
    if isinstance(left, str) != isinstance(right, str) or isinstance(left, list) or isinstance(right, list):
        raise ExpressionError(f"{_shown(left)} and {_shown(right)} have no order")
    return _ORDER[type(op)](left, right)


def _membership(op: ast.cmpop, left: Value, right: Value) -> bool:
    if left is INACTIVE or right is INACTIVE:
        return False
    if isinstance(right, list):
        inside = any(item is not INACTIVE and _same(left, item) for item in right)
    elif isinstance(left, str) and isinstance(right, str):
        inside = left in right
    else:
        raise ExpressionError(f"{_shown(right)} is not a list")
    return inside == isinstance(op, ast.In)


def _same(left: Value, right: Value) -> bool:
    """Equality without Python's `True == 1`: in a space file those are two settings."""
    if isinstance(left, list) and isinstance(right, list):
        return len(left) == len(right) and all(_same(a, b) for a, b in zip(left, right, strict=True))
    return isinstance(left, bool) == isinstance(right, bool) and left == right


def _shown(value: Value) -> str:
    return f"'{value}'" if isinstance(value, str) else str(value)
