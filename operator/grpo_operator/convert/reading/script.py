"""The training command of a bash script with the values of its variables."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from grpo_operator.convert.reading.shell_values import Unknown, Value, Variables
from grpo_operator.convert.reading.shell_words import Command, Word, commands

_OPENING = ("if", "for", "while", "until", "case", "select", "function", "{")
_CLOSING = ("fi", "done", "esac", "}")
_LEADING = ("then", "else", "elif", "do", "!", "(")
_DECLARING = ("export", "declare", "local", "readonly", "typeset")
_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)(\+?)=")


@dataclass(frozen=True, slots=True)
class Argument:
    """A word of a command. ``text``: as far as it is known; ``unknown``: why a part of it is not."""

    line: int
    text: str
    unknown: str | None = None


def argument_lists(script: str, given: Mapping[str, str]) -> list[list[Argument]]:
    """Return the words of each command of a script, in its order.

    Variables that are set in a branch or a loop are unknown afterwards, unless they keep their value.
    """
    return _Reader(Variables(given)).read(list(commands(script)))


class _Reader:
    def __init__(self, variables: Variables) -> None:
        self._variables, self._depth, self._found = variables, 0, list[list[Argument]]()

    def read(self, all_commands: Sequence[Command]) -> list[list[Argument]]:
        for command in all_commands:
            words = self._inside(command.words)
            conditional = self._depth > 0 or command.after in ("&&", "||")
            while words and (words[0].literal in _DECLARING or words[0].literal.startswith("-")):
                words = words[1:]
            while words and (match := _ASSIGNMENT.match(words[0].literal)) and _is_name(words[0]):
                self._assign(words[0], match[1], bool(match[2]), conditional)
                words = words[1:]
            if words:
                self._found.append([each for word in words for each in self._arguments(word)])
        return self._found

    def _inside(self, words: list[Word]) -> list[Word]:
        """Count the blocks that a command opens and closes; return its words without keywords."""
        first = words[0].literal
        if first in _OPENING:
            self._depth += 1
            return words[1:]
        if first in _CLOSING:
            self._depth = max(0, self._depth - 1)
            return words[1:]
        literals = [word.literal for word in words]
        if literals[1:3] == ["(", ")"]:  # a function: its closing brace is a command of its own
            self._depth += literals[-1] == "{"
            return []
        if self._depth and ")" in literals and "(" not in literals:  # a pattern of case
            return words[literals.index(")") + 1 :]
        return self._inside(words[1:]) if first in _LEADING and len(words) > 1 else words

    def _assign(self, word: Word, name: str, appends: bool, conditional: bool) -> None:
        variables = self._variables
        if word.array is not None:
            self._assign_array(word, name, appends, conditional)
            return
        value = _without_prefix(word, variables, f"{name}{'+' if appends else ''}=")
        if appends and isinstance(value, str):
            first = variables.lookup(name, word.line)
            value = first if isinstance(first, Unknown) else f"{first}{value}"
        if conditional and value != variables.values.get(name):
            why = f"line {word.line}: {name} is set in a branch: add --define {name}=VALUE"
            value = Unknown(f"${{{name}}}", why)
        variables.values[name] = value

    def _assign_array(self, word: Word, name: str, appends: bool, conditional: bool) -> None:
        arrays = self._variables.arrays
        before = arrays.get(name, []) if appends else []
        elements = [each for inner in word.array or [] for each in self._variables.expand(inner)]
        if conditional:
            why = f"line {word.line}: {name} has other words in a branch"
            elements = [(word.line, Unknown(f"${{{name}[@]}}", why))]
        arrays[name] = [*before, *elements]

    def _arguments(self, word: Word) -> list[Argument]:
        return [_argument(line, value) for line, value in self._variables.expand(word)]


def _argument(line: int, value: Value) -> Argument:
    return Argument(line, value.text, value.why) if isinstance(value, Unknown) else Argument(line, value)


def _is_name(word: Word) -> bool:
    """Return whether the part before the equals sign is plain text: an option such as a.b=c is none."""
    return not word.parts or bool(_ASSIGNMENT.match(word.parts[0].text))


def _without_prefix(word: Word, variables: Variables, prefix: str) -> Value:
    value = variables.text(word)
    if isinstance(value, Unknown):
        return Unknown(value.text[len(prefix) :], value.why)
    return value[len(prefix) :]
