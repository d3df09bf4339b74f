"""Values of a script's variables: parameters, defaults and integer arithmetic, without running anything."""

import ast
import operator
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from grpo_operator.convert.reading.shell_words import Kind, Part, Word, commands

_OPERATORS: dict[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: lambda a, b: int(a / b),
    ast.FloorDiv: lambda a, b: int(a / b),
    ast.Mod: operator.mod,
}
_PARAMETER = re.compile(
    r"(#?)([A-Za-z_][A-Za-z0-9_]*|[0-9]+|[@*#?!$-])(\[[@*0-9]+\])?(:?[-+=?]|//?|##?|%%?)?(.*)", re.S
)


@dataclass(frozen=True, slots=True)
class Unknown:
    """A value that only a run of the script knows.

    ``text``: the value with the unknown expansions as they are written. ``why``: the first one and its line.
    """

    text: str
    why: str


Value = str | Unknown


@dataclass(slots=True)
class Variables:
    """Variables of a script, as far as they are known. ``given``: values by the user, which come first."""

    given: Mapping[str, str]
    values: dict[str, Value] = field(default_factory=dict)
    arrays: dict[str, list[tuple[int, Value]]] = field(default_factory=dict)

    def expand(self, word: Word) -> list[tuple[int, Value]]:
        """Return the words that a word becomes, with their lines; an array becomes its elements."""
        whole = word.parts[0] if len(word.parts) == 1 else None
        used = [part for part in word.parts if not (part.kind is Kind.TEXT and not part.text)]
        if len(used) == 1 and used[0].kind is Kind.PARAMETER:
            if used[0].text in ("@", "*"):
                return []
            if array := re.fullmatch(r"(\w+)\[[@*]\]", used[0].text):
                why = f"line {word.line}: the script does not set the array {array[1]}"
                unknown = Unknown(word.literal, why)
                return self.arrays.get(array[1], [(word.line, unknown)])
        value = self.text(word)
        if whole is not None and whole.kind is Kind.PARAMETER and not whole.quoted and isinstance(value, str):
            return [(word.line, each) for each in value.split()]
        return [(word.line, value)]

    def text(self, word: Word) -> Value:
        """Return the text of a word."""
        values = [self._part(part, word.line) for part in word.parts]
        text = "".join(value.text if isinstance(value, Unknown) else value for value in values)
        unknown = next((value for value in values if isinstance(value, Unknown)), None)
        return Unknown(text, unknown.why) if unknown else text

    def _part(self, part: Part, line: int) -> Value:
        if part.kind is Kind.TEXT:
            return part.text
        if part.kind is Kind.COMMAND:
            written = f"$({part.text.strip()})"
            return Unknown(written, f"line {line}: {written} needs a run of the script")
        if part.kind is Kind.ARITHMETIC:
            return self._arithmetic(part.text, line)
        return self._parameter(part.text, line)

    def _parameter(self, text: str, line: int) -> Value:
        match = _PARAMETER.fullmatch(text)
        unreadable = Unknown(f"${{{text}}}", f"line {line}: ${{{text}}} needs a run of the script")
        if match is None or match[1]:
            return unreadable
        name, index, sign, rest = match[2], match[3], match[4] or "", match[5]
        value = self.lookup(name, line)
        if index or sign.lstrip(":") in ("/", "//", "#", "##", "%", "%%"):
            return unreadable
        unset = name not in self.values and name not in self.given
        empty = unset or (value == "" and sign.startswith(":"))
        if sign.endswith(("-", "=")):
            return self._nested(rest, line) if empty else value
        if sign.endswith("+"):
            return "" if empty else self._nested(rest, line)
        return value

    def lookup(self, name: str, line: int) -> Value:
        """Return the value of a variable."""
        if name in self.given:
            return self.given[name]
        why = f"line {line}: the script does not set {name}: add --define {name}=VALUE"
        return self.values.get(name, Unknown(f"${{{name}}}", why))

    def _nested(self, text: str, line: int) -> Value:
        found = next(commands(f'"{text}"' if '"' not in text else text), None)
        return self.text(found.words[0]) if found is not None else ""

    def _arithmetic(self, text: str, line: int) -> Value:
        unknown: list[Unknown] = []

        def number(match: "re.Match[str]") -> str:
            value = self._parameter(match[1] or match[2] or "", line)
            if isinstance(value, Unknown):
                unknown.append(value)
                return "0"
            return f"({value})"

        expression = re.sub(r"\$?\{([^}]*)\}|\$?\b([A-Za-z_]\w*)", number, text)
        try:
            result = _evaluated(ast.parse(expression.strip(), mode="eval").body)
        except (SyntaxError, ValueError, ArithmeticError, RecursionError):
            result = None
        written = f"$(({text.strip()}))"
        why = unknown[0].why if unknown else f"line {line}: {written} is no arithmetic of integers"
        return Unknown(written, why) if unknown or result is None else str(result)


def _evaluated(node: ast.expr) -> int:
    """Return the value of integers, + - * / % and brackets. Raises ValueError for anything else."""
    if isinstance(node, ast.Constant) and type(node.value) is int:
        return node.value
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -_evaluated(node.operand)
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        return _OPERATORS[type(node.op)](_evaluated(node.left), _evaluated(node.right))
    raise ValueError("no arithmetic of integers")
