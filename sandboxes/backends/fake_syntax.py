"""The grammar of the pretended shell: text in, a tree out.

Invariant: pure. Text that is no command raises ``ShellSyntaxError``; text that merely has not ended yet raises
``Incomplete``, so that a reader of lines knows when to read on. What is left out of the real grammar (here-documents,
patterns, ``case``) is refused or taken literally, never guessed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple


class ShellSyntaxError(Exception):
    """The text is no command."""


class Incomplete(ShellSyntaxError):
    """The text may become a command when more follows."""


class Part(NamedTuple):
    """A piece of a word."""

    kind: Literal["text", "variable", "command", "sum"]
    value: str
    quoted: bool


Word = tuple[Part, ...]


class Redirect(NamedTuple):
    fd: int
    operator: str
    target: Word


@dataclass
class Simple:
    assignments: list[tuple[str, Word]] = field(default_factory=list)
    words: list[Word] = field(default_factory=list)
    redirects: list[Redirect] = field(default_factory=list)


@dataclass
class Pipeline:
    commands: list[Node]
    negated: bool = False


@dataclass
class AndOr:
    first: Node
    rest: list[tuple[str, Node]]


@dataclass
class Sequence_:
    """Commands one after the other; those with True run in the background."""

    items: list[tuple[Node, bool]]


@dataclass
class Group:
    body: Node
    subshell: bool
    redirects: list[Redirect] = field(default_factory=list)


@dataclass
class While:
    condition: Node
    body: Node
    until: bool
    redirects: list[Redirect] = field(default_factory=list)


@dataclass
class If:
    branches: list[tuple[Node, Node]]
    otherwise: Node | None
    redirects: list[Redirect] = field(default_factory=list)


@dataclass
class For:
    name: str
    words: list[Word]
    body: Node
    redirects: list[Redirect] = field(default_factory=list)


@dataclass
class Function:
    name: str
    body: Node


Node = Simple | Pipeline | AndOr | Sequence_ | Group | While | If | For | Function


class _Token(NamedTuple):
    kind: Literal["word", "operator", "redirect"]
    text: str
    word: Word = ()
    fd: int = -1


_OPERATORS = ("&&", "||", ";;", ";", "&", "|", "(", ")", "\n")
_REDIRECTS = (">>", ">&", "<&", ">", "<")
_SPECIAL = set(" \t\n;&|()<>")
_NAME = set("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_")


def parse(text: str) -> Sequence_:
    """The commands in ``text``."""
    parser = _Parser(_Lexer(text).tokens())
    tree = parser.sequence(())
    if parser.peek() is not None:
        raise ShellSyntaxError(f"{parser.peek_text()!r} unexpected")
    return tree


class _Lexer:
    def __init__(self, text: str) -> None:
        self._text = text
        self._at = 0

    def tokens(self) -> list[_Token]:
        found: list[_Token] = []
        text = self._text
        while self._at < len(text):
            char = text[self._at]
            if char in " \t":
                self._at += 1
            elif char == "#":
                end = text.find("\n", self._at)
                self._at = len(text) if end < 0 else end
            elif text.startswith("\\\n", self._at):
                self._at += 2
            else:
                found.append(self._redirect() or self._operator() or self._word())
        return found

    def _operator(self) -> _Token | None:
        for operator in _OPERATORS:
            if self._text.startswith(operator, self._at):
                self._at += len(operator)
                return _Token("operator", operator)
        return None

    def _redirect(self) -> _Token | None:
        at, digits = self._at, ""
        while at < len(self._text) and self._text[at].isdigit():
            digits += self._text[at]
            at += 1
        for operator in _REDIRECTS:
            if self._text.startswith(operator, at):
                if self._text.startswith("<<", at):
                    raise ShellSyntaxError("this shell has no here-documents")
                self._at = at + len(operator)
                fd = int(digits) if digits else (0 if operator.startswith("<") else 1)
                return _Token("redirect", operator, fd=fd)
        return None

    def _word(self) -> _Token:
        start, parts = self._at, []
        while self._at < len(self._text) and self._text[self._at] not in _SPECIAL:
            parts += self._part()
        return _Token("word", self._text[start : self._at], tuple(parts))

    def _part(self) -> Sequence[Part]:
        char = self._text[self._at]
        if char == "'":
            return [Part("text", self._until("'"), True)]
        if char == '"':
            return self._double()
        if char == "\\":
            self._at += 2
            if self._at > len(self._text):
                raise Incomplete("a backslash at the end")
            escaped = self._text[self._at - 1]
            return [] if escaped == "\n" else [Part("text", escaped, True)]
        if char == "$":
            return [self._dollar(quoted=False)]
        self._at += 1
        return [Part("text", char, False)]

    def _until(self, end: str) -> str:
        stop = self._text.find(end, self._at + 1)
        if stop < 0:
            raise Incomplete(f"unterminated {end}")
        inner, self._at = self._text[self._at + 1 : stop], stop + 1
        return inner

    def _double(self) -> list[Part]:
        self._at += 1
        parts = [Part("text", "", True)]
        while True:
            if self._at >= len(self._text):
                raise Incomplete('unterminated "')
            char = self._text[self._at]
            if char == '"':
                self._at += 1
                return parts
            if char == "$":
                parts.append(self._dollar(quoted=True))
                continue
            if char == "\\" and self._text[self._at + 1 : self._at + 2] in ('"', "\\", "$", "`"):
                self._at += 1
                char = self._text[self._at]
            parts.append(Part("text", char, True))
            self._at += 1

    def _dollar(self, quoted: bool) -> Part:
        text, at = self._text, self._at + 1
        if text.startswith("((", at):
            end = text.find("))", at)
            if end < 0:
                raise Incomplete("unterminated $((")
            self._at = end + 2
            return Part("sum", text[at + 2 : end], quoted)
        if text.startswith("(", at):
            return self._command(quoted)
        if text.startswith("{", at):
            self._at = at
            return Part("variable", self._until("}"), quoted)
        if at < len(text) and text[at] in "?$!#@*0123456789":
            self._at = at + 1
            return Part("variable", text[at], quoted)
        end = at
        while end < len(text) and text[end] in _NAME:
            end += 1
        self._at = end
        return Part("variable", text[at:end], quoted) if end > at else Part("text", "$", quoted)

    def _command(self, quoted: bool) -> Part:
        """``$(…)``, whose end is the parenthesis that no quote or other parenthesis inside owns."""
        start = self._at = self._at + 2
        depth = 1
        while self._at < len(self._text):
            char = self._text[self._at]
            if char in "'\"\\$":
                self._part()
                continue
            depth += {"(": 1, ")": -1}.get(char, 0)
            self._at += 1
            if depth == 0:
                return Part("command", self._text[start : self._at - 1], quoted)
        raise Incomplete("unterminated $(")


class _Parser:
    def __init__(self, tokens: list[_Token]) -> None:
        self._tokens = tokens
        self._at = 0

    def peek(self) -> _Token | None:
        return self._tokens[self._at] if self._at < len(self._tokens) else None

    def peek_text(self) -> str:
        token = self.peek()
        return "" if token is None else token.text

    def _take(self, kind: str, *texts: str) -> bool:
        token = self.peek()
        if token is not None and token.kind == kind and token.text in texts:
            self._at += 1
            return True
        return False

    def _need(self, kind: str, text: str) -> None:
        if not self._take(kind, text):
            if self.peek() is None:
                raise Incomplete(f"expecting {text!r}")
            raise ShellSyntaxError(f"{self.peek_text()!r} unexpected (expecting {text!r})")

    def _skip_newlines(self) -> None:
        while self._take("operator", "\n"):
            pass

    def _at_end(self, ends: Sequence[str]) -> bool:
        token = self.peek()
        return token is None or (token.text in ends and token.kind in ("word", "operator"))

    def sequence(self, ends: Sequence[str]) -> Sequence_:
        """Commands up to one of the words ``ends``, which is left to be taken."""
        items: list[tuple[Node, bool]] = []
        while True:
            while self._take("operator", "\n"):
                pass
            if self._at_end(ends):
                return Sequence_(items)
            node = self._and_or()
            background = self._take("operator", "&")
            items.append((node, background))
            if not background and not self._take("operator", ";", "\n"):
                return Sequence_(items)

    def _body(self, *ends: str) -> Sequence_:
        body = self.sequence(ends)
        if not body.items:
            if self.peek() is None:
                raise Incomplete("expecting a command")
            raise ShellSyntaxError(f"{self.peek_text()!r} unexpected")
        return body

    def _and_or(self) -> Node:
        first, rest = self._pipeline(), []
        while (token := self.peek()) is not None and token.kind == "operator" and token.text in ("&&", "||"):
            self._at += 1
            self._skip_newlines()
            rest.append((token.text, self._pipeline()))
        return AndOr(first, rest) if rest else first

    def _pipeline(self) -> Node:
        negated = self._take("word", "!")
        commands = [self._command()]
        while self._take("operator", "|"):
            self._skip_newlines()
            commands.append(self._command())
        return Pipeline(commands, negated) if negated or len(commands) > 1 else commands[0]

    def _command(self) -> Node:
        token = self.peek()
        if token is None:
            raise Incomplete("expecting a command")
        node = self._compound()
        if node is None:
            return self._simple()
        node.redirects += self._redirects()
        return node

    def _compound(self) -> Group | While | If | For | None:
        if self._take("operator", "("):
            body = self._body(")")
            self._need("operator", ")")
            return Group(body, subshell=True)
        if self._take("word", "{"):
            body = self._body("}")
            self._need("word", "}")
            return Group(body, subshell=False)
        if self.peek_text() in ("while", "until"):
            until = self.peek_text() == "until"
            self._at += 1
            condition = self._body("do")
            return While(condition, self._do(), until)
        if self._take("word", "if"):
            return self._if()
        if self._take("word", "for"):
            return self._for()
        return None

    def _do(self) -> Node:
        self._need("word", "do")
        body = self._body("done")
        self._need("word", "done")
        return body

    def _if(self) -> If:
        branches: list[tuple[Node, Node]] = []
        while True:
            condition = self._body("then")
            self._need("word", "then")
            branches.append((condition, self._body("elif", "else", "fi")))
            if not self._take("word", "elif"):
                break
        otherwise = self._body("fi") if self._take("word", "else") else None
        self._need("word", "fi")
        return If(branches, otherwise)

    def _for(self) -> For:
        token = self.peek()
        if token is None:
            raise Incomplete("expecting a name")
        self._at += 1
        self._need("word", "in")
        words = []
        while (following := self.peek()) is not None and following.kind == "word":
            words.append(following.word)
            self._at += 1
        self._take("operator", ";", "\n")
        return For(token.text, words, self._do())

    def _simple(self) -> Node:
        node = Simple()
        while (token := self.peek()) is not None:
            if token.kind == "redirect":
                node.redirects += self._redirects()
            elif token.kind == "word":
                self._at += 1
                name, equals, _ = token.text.partition("=")
                if not node.words and equals and name and set(name) <= _NAME and not name[0].isdigit():
                    node.assignments.append((name, _after(token.word, len(name) + 1)))
                else:
                    node.words.append(token.word)
            elif token.text == "(" and len(node.words) == 1 and not node.assignments:
                return self._function(node)
            else:
                break
        if not (node.words or node.assignments or node.redirects):
            raise ShellSyntaxError(f"{self.peek_text()!r} unexpected")
        return node

    def _function(self, node: Simple) -> Function:
        self._need("operator", "(")
        self._need("operator", ")")
        self._skip_newlines()
        return Function("".join(part.value for part in node.words[0]), self._command())

    def _redirects(self) -> list[Redirect]:
        found = []
        while (token := self.peek()) is not None and token.kind == "redirect":
            self._at += 1
            target = self.peek()
            if target is None or target.kind != "word":
                raise ShellSyntaxError("a redirection to nothing")
            self._at += 1
            found.append(Redirect(token.fd, token.text, target.word))
        return found


def _after(word: Word, count: int) -> Word:
    """A word without its first ``count`` characters, which are plain text."""
    return word[count:]
