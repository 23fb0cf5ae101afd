"""Render messages with a tokenizer's chat template, as transformers does, and find the answers in the text.

Templates are untrusted programs: they run in Jinja's sandbox and get only plain values.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from trainer.errors import InputError

MOST_TEXT = 1 << 22
"""Limit of characters of a rendered text."""
# A message's reasoning has one of these names; templates read the first.
REASONING = ("reasoning_content", "thinking", "reasoning")
Spans = list[tuple[int, int]]
# Exceptions that expressions of a template can raise: a division by zero, a wrong index, an endless recursion.
_FAILURES = (
    jinja2.TemplateError,
    ArithmeticError,
    AttributeError,
    LookupError,
    MemoryError,
    RuntimeError,
    SyntaxError,
    TypeError,
    ValueError,
)


class TemplateError(InputError):
    """The chat template cannot render these messages."""


@dataclass(frozen=True)
class ChatTemplate:
    """A template and the special tokens that it may use."""

    source: str
    tokens: Mapping[str, str]

    @property
    def marks_answers(self) -> bool:
        """Return whether the template marks the answers itself."""
        return any(word in self.source for word in ("{% generation", "{%- generation", "{%generation"))

    def render(
        self,
        messages: Sequence[dict[str, object]],
        prompt: bool = False,
        tools: Sequence[dict[str, object]] | None = None,
        more: Mapping[str, object] | None = None,
    ) -> str:
        """Return the text of messages; with `prompt`, followed by the beginning of an answer."""
        return self.tracked(messages, prompt, tools, more)[0]

    def tracked(
        self,
        messages: Sequence[dict[str, object]],
        prompt: bool = False,
        tools: Sequence[dict[str, object]] | None = None,
        more: Mapping[str, object] | None = None,
    ) -> tuple[str, Spans]:
        """Return the text, and the ranges of characters that the template marks as answers."""
        values = {**self.tokens, **(more or {})}
        given = [_with_reasoning(message) for message in messages]
        try:
            template = _compiled(self.source)
            values |= {"messages": given, "tools": tools, "documents": None, "add_generation_prompt": prompt}
            blocks, spans = list[str](), Spans()
            with template.environment.tracking(blocks, spans):  # type: ignore[attr-defined]
                length = 0
                for block in template.root_render_func(template.new_context(values)):
                    blocks.append(block)
                    length += len(block)
                    if length > MOST_TEXT:
                        break
        except _FAILURES as error:
            raise TemplateError(f"the chat template refuses the messages: {_reason(error)}") from None
        text = "".join(blocks)
        if len(text) > MOST_TEXT:
            raise TemplateError(f"the chat template turns the messages into more than {MOST_TEXT} characters")
        return text, spans

    def after_answer(self) -> str:
        """Return the text after the last answer of a conversation; "" if the template refuses a plain conversation."""
        answer = "Zyxwvut"
        try:
            text = self.render([{"role": "user", "content": "?"}, {"role": "assistant", "content": answer}])
        except TemplateError:
            return ""
        return text.rpartition(answer)[2] if answer in text else ""


def read_source(file: Path, *, check: bool) -> str:
    """Return the template in a file; with `check`, raise an InputError if it is not a jinja template."""
    try:
        source = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        problem = error.strerror if isinstance(error, OSError) else str(error)
        raise InputError(f"{file}: {problem}", "name a file with a jinja template") from None
    if check:
        _check_syntax(source, file)
    return source


def _check_syntax(source: str, file: Path) -> None:
    try:
        _compiled(source)
    except jinja2.TemplateSyntaxError as error:
        problem = f"{file}:{error.lineno}: not a jinja template: {error.message}"
        raise InputError(problem, "correct the template, or name another one") from None


def _reason(error: BaseException) -> str:
    """Return why a template failed: its own message, or Python's error for an expression in it."""
    return f"{type(error).__name__}: {error}" if isinstance(error, LookupError) else str(error)


def _with_reasoning(message: dict[str, object]) -> dict[str, object]:
    found = next((message[name] for name in REASONING if message.get(name) is not None), None)
    return message if found is None else {"thinking": found, **message, "reasoning_content": found}


@functools.lru_cache(32)
def _compiled(source: str) -> jinja2.Template:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Answers, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _json
    environment.globals |= {
        "raise_exception": _refuse,
        "strftime_now": lambda form: datetime.now().strftime(form),
        "dict": _Dict(),
        "namespace": _PlainNamespace,
    }
    return environment.from_string(source)


class _Answers(jinja2.ext.Extension):
    """The tag `generation`: what is inside is an answer."""

    tags = {"generation"}  # noqa: RUF012

    def __init__(self, environment: jinja2.Environment) -> None:
        super().__init__(environment)
        environment.extend(tracking=self.tracking)
        self._blocks: list[str] = []
        self._spans: Spans = []

    @contextmanager
    def tracking(self, blocks: list[str], spans: Spans) -> Iterator[None]:
        """Record the ranges of answers, in characters, while `blocks` grow."""
        self._blocks, self._spans = blocks, spans
        yield
        self._blocks, self._spans = [], []

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.CallBlock(self.call_method("_answer"), [], [], body).set_lineno(line)

    def _answer(self, caller: Any) -> str:
        text = str(caller())
        begin = sum(map(len, self._blocks))
        self._spans.append((begin, begin + len(text)))
        return text


class _Dict:
    """`dict` for templates, without the attributes of the class."""

    def __call__(self, *values: Any, **named: Any) -> dict[str, object]:
        return dict(*values, **named)

    def fromkeys(self, *values: Any) -> dict[str, object]:
        return dict.fromkeys(*values)


class _PlainNamespace(Namespace):
    """`namespace` for templates, which stores no name that begins with an underscore."""

    def __init__(*given: Any, **named: Any) -> None:
        own, *values = given
        attributes = dict(*values, **named)
        for name in attributes:
            _check_name(name)
        Namespace.__init__(own, attributes)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)


def _check_name(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise jinja2.exceptions.SecurityError(f"a namespace cannot store {name!r}")


def _json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: Any = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _refuse(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)
