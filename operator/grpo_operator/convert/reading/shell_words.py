"""Words and commands of a bash script, read without running anything.

Words keep their ``$`` expansions as parts, because values are known only in the order of the commands.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import StrEnum

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*|[0-9@*#?!$-]")
_SEPARATORS = ("&&", "||", ";;", "|", "&", ";", "\n")
_CLOSING = {"(": ")", "{": "}"}


class Kind(StrEnum):
    """Kind of a part of a word."""

    TEXT = "text"
    PARAMETER = "parameter"  # $NAME or ${...}
    ARITHMETIC = "arithmetic"  # $((...))
    COMMAND = "command"  # $(...) or `...`


@dataclass(frozen=True, slots=True)
class Part:
    """Literal text, or the inner text of an expansion."""

    kind: Kind
    text: str
    quoted: bool


@dataclass(slots=True)
class Word:
    """A word with the number of the line on which it begins. ``array``: words of NAME=(...), else None."""

    line: int
    parts: list[Part] = field(default_factory=list)
    array: "list[Word] | None" = None

    def add(self, kind: Kind, text: str, quoted: bool) -> None:
        """Append a part; adjacent literal text becomes one part."""
        last = self.parts[-1] if self.parts else None
        if last is not None and kind is last.kind is Kind.TEXT and last.quoted is quoted:
            self.parts[-1] = Part(kind, last.text + text, quoted)
        else:
            self.parts.append(Part(kind, text, quoted))

    @property
    def literal(self) -> str:
        """Return the text of the word, with its expansions as they are written."""
        forms = {
            Kind.TEXT: "{}", Kind.PARAMETER: "${{{}}}", Kind.ARITHMETIC: "$(({}))", Kind.COMMAND: "$({})",
        }  # fmt: skip
        return "".join(forms[part.kind].format(part.text) for part in self.parts)


@dataclass(frozen=True, slots=True)
class Command:
    """Words up to a separator. ``after``: the separator before the command."""

    words: list[Word]
    after: str


def commands(script: str) -> Iterator[Command]:
    """Yield the commands of a script. Comments, redirections and here-documents are left out."""
    return _Scanner(script).commands()


class _Scanner:
    def __init__(self, text: str, line: int = 1) -> None:
        self._text, self._at, self._line = text, 0, line

    def commands(self) -> Iterator[Command]:
        after = "\n"
        words: list[Word] = []
        while self._at < len(self._text):
            separator = next((s for s in _SEPARATORS if self._text.startswith(s, self._at)), None)
            if separator is not None:
                self._step(len(separator))
                if words:
                    yield Command(words, after)
                after, words = separator, []
            elif (word := self._word_or_space()) is not None:
                words.append(word)
        if words:
            yield Command(words, after)

    def _word_or_space(self) -> Word | None:
        """Read a word, or skip what is no part of a word and return None."""
        rest = self._text[self._at :]
        if rest[0] in " \t\r":
            self._step(1)
        elif rest.startswith("\\\n"):
            self._step(2)
        elif rest[0] == "#":
            self._step(len(rest.split("\n", 1)[0]))
        elif redirection := re.match(r"[0-9]*(>>|>|<)(&[0-9-]|[ \t]*[^\s;&|<]+)?|&>>?[ \t]*\S+", rest):
            self._skip_redirection(redirection, rest)
        elif rest[0] in "()":
            self._step(1)
            return Word(self._line, [Part(Kind.TEXT, rest[0], False)])
        else:
            return self._word()
        return None

    def _skip_redirection(self, found: "re.Match[str]", rest: str) -> None:
        document = re.match(r"<<-?[ \t]*(['\"]?)(\w+)\1", rest)
        if document is None:
            self._step(found.end())
            return
        end = re.search(rf"^\t*{document[2]}$", rest, re.MULTILINE)
        self._step(end.end() if end else len(rest))

    def _word(self) -> Word:
        word = Word(self._line)
        while self._at < len(self._text):
            character = self._text[self._at]
            if character == "(" and word.parts and re.fullmatch(r"\w+\+?=", word.literal):
                word.array = self._array()
                break
            if character in " \t\r\n;&|()<>":
                break
            self._part(word, character)
        return word

    def _part(self, word: Word, character: str) -> None:
        if character == "'":
            end = self._text.find("'", self._at + 1)
            end = len(self._text) if end < 0 else end
            word.add(Kind.TEXT, self._text[self._at + 1 : end], True)
            self._step(end + 1 - self._at)
        elif character == '"':
            self._double_quoted(word)
        elif character == "\\":
            if self._text[self._at + 1 : self._at + 2] != "\n":
                word.add(Kind.TEXT, self._text[self._at + 1 : self._at + 2], True)
            self._step(2)
        elif character in "$`":
            self._expansion(word, False)
        else:
            word.add(Kind.TEXT, character, False)
            self._step(1)

    def _double_quoted(self, word: Word) -> None:
        self._step(1)
        word.add(Kind.TEXT, "", True)
        while self._at < len(self._text) and self._text[self._at] != '"':
            character = self._text[self._at]
            if character == "\\" and self._text[self._at + 1 : self._at + 2] in ('"', "\\", "$", "`", "\n"):
                word.add(Kind.TEXT, self._text[self._at + 1].strip("\n"), True)
                self._step(2)
            elif character in "$`":
                self._expansion(word, True)
            else:
                word.add(Kind.TEXT, character, True)
                self._step(1)
        self._step(1)

    def _expansion(self, word: Word, quoted: bool) -> None:
        rest = self._text[self._at :]
        if rest[0] == "`":
            end = rest.find("`", 1)
            end = len(rest) if end < 0 else end
            word.add(Kind.COMMAND, rest[1:end], quoted)
            self._step(end + 1)
        elif rest.startswith("$((") and (end := _closed(rest, 1)) and rest[:end].endswith("))"):
            word.add(Kind.ARITHMETIC, rest[3 : end - 2], quoted)
            self._step(end)
        elif rest[1:2] in _CLOSING:
            end = _closed(rest, 1)
            word.add(Kind.COMMAND if rest[1] == "(" else Kind.PARAMETER, rest[2 : end - 1], quoted)
            self._step(end)
        elif name := _NAME.match(rest, 1):
            word.add(Kind.PARAMETER, name[0], quoted)
            self._step(name.end())
        else:
            word.add(Kind.TEXT, "$", quoted)
            self._step(1)

    def _array(self) -> list[Word]:
        self._step(1)
        words: list[Word] = []
        while self._at < len(self._text) and self._text[self._at] != ")":
            if self._text[self._at] in "\n;&|":
                self._step(1)
            elif (word := self._word_or_space()) is not None:
                words.append(word)
        self._step(1)
        return words

    def _step(self, count: int) -> None:
        self._line += self._text.count("\n", self._at, self._at + count)
        self._at += count


def _closed(text: str, start: int) -> int:
    """Return the index after the bracket that closes the one at ``start``."""
    opening, closing, depth = text[start], _CLOSING[text[start]], 0
    for at in range(start, len(text)):
        depth += {opening: 1, closing: -1}.get(text[at], 0)
        if not depth:
            return at + 1
    return len(text)
