"""Markdown tables, and the string literals of Python code."""

import ast
from collections.abc import Iterable, Sequence


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table; pipes and line breaks in cells are escaped."""
    lines = [head, ["---"] * len(head), *rows]
    return "".join("| " + " | ".join(map(_cell, line)) + " |\n" for line in lines)


def strings(node: ast.AST) -> list[str]:
    """Return the string literals that ``node`` may evaluate to: itself, or the branches of its conditions.

    The condition itself and the arguments of nested calls are left out.
    """
    if isinstance(node, ast.Constant):
        return [node.value] if isinstance(node.value, str) else []
    if isinstance(node, ast.IfExp):
        return strings(node.body) + strings(node.orelse)
    if isinstance(node, ast.BoolOp):
        return [text for value in node.values for text in strings(value)]
    return []


def called(call: ast.Call) -> str:
    """Return the name of the function or method that is called."""
    function = call.func
    return function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")
