"""Conversations, and prompts with completions, as text with the ranges to learn."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

from trainer.chat_template import ChatTemplate, Spans, TemplateError
from trainer.evaluate.rows import RowFault, read_rows

EXAMPLE = '{"messages": [{"role": "user", "content": "..."}, {"role": "assistant", "content": "..."}]}'
COMPLETION = '{"prompt": "...", "completion": "..."}'
FORMS = f"each line has the form {EXAMPLE} or {COMPLETION}"
ROLES = ("system", "user", "assistant", "tool")
"""The roles that chat templates usually have."""


@dataclass(frozen=True)
class Marked:
    """A text and the ranges of its characters to learn; `ends`: an end-of-text token follows and is learned too."""

    line: int
    text: str
    spans: tuple[tuple[int, int], ...]
    ends: bool = False


def read_examples(
    file: Path, make: Callable[[int, Mapping[str, object]], list[Marked]], remedy: str = FORMS
) -> list[Marked]:
    """Return the results of `make` for each line of a file; raise one error with the faults of all lines."""
    access = "correct train.tune: it needs files with a JSON object on each line"
    return read_rows(file, make, remedy, "examples", access)


class ChatReader:
    """Makes examples from rows with a chat template."""

    def __init__(self, template: ChatTemplate | None) -> None:
        self.template = template

    def example(self, line: int, row: Mapping[str, object]) -> list[Marked]:
        """Return the example of a row of a chat file."""
        if "messages" in row:
            messages = _messages(row["messages"], "messages")
            if not any(message["role"] == "assistant" for message in messages):
                raise RowFault("has no answer: no message has the role 'assistant'")
            return [self._marked(line, row, messages, None)]
        if "prompt" not in row or "completion" not in row:
            fields = ", ".join(sorted(map(str, row))) or "none"
            raise RowFault(f"has neither 'messages' nor 'prompt' and 'completion' (it has: {fields})")
        return [self.completed(line, row, row["prompt"], row["completion"], "completion")]

    def completed(
        self, line: int, row: Mapping[str, object], prompt: object, completion: object, name: str
    ) -> Marked:
        """Return the example of a prompt and a completion (both texts or both messages); only the latter is learned."""
        if isinstance(prompt, str) and isinstance(completion, str):
            if not completion:
                raise RowFault(f"has no answer: field {name!r} is empty")
            text = prompt + completion
            return Marked(line, text, ((len(prompt), len(text)),), ends=True)
        if isinstance(prompt, str) or isinstance(completion, str):
            raise RowFault(f"fields 'prompt' and {name!r} must both be texts, or both lists of messages")
        before = _messages(prompt, "prompt")
        return self._marked(line, row, [*before, *_messages(completion, name)], len(before))

    def _marked(
        self, line: int, row: Mapping[str, object], messages: list[dict[str, object]], prompt: int | None
    ) -> Marked:
        if self.template is None:
            raise RowFault(
                "has messages, but the tokenizer has no chat template: name a template in tune.template"
            )
        tools, more = row.get("tools"), row.get("chat_template_kwargs") or {}
        if not (tools is None or isinstance(tools, list)) or not isinstance(more, dict):
            raise RowFault("field 'tools' must be a list, and 'chat_template_kwargs' an object")
        rendering = _Rendering(self.template, messages, tools, more)
        rendering.refuse_unknown_roles()
        text, spans = rendering.answers() if prompt is None else rendering.after(prompt)
        return Marked(line, text, tuple(spans))


@dataclass(frozen=True)
class _Rendering:
    """Renders messages with a template."""

    template: ChatTemplate
    messages: list[dict[str, object]]
    tools: Sequence[dict[str, object]] | None
    more: Mapping[str, object]

    def _text(self, count: int, prompt: bool = False) -> str:
        return self.template.render(self.messages[:count], prompt, self.tools, self.more)

    def refuse_unknown_roles(self) -> None:
        """Raise a RowFault for a message with an unusual role that the template leaves out."""
        for number, message in enumerate(self.messages):
            if message["role"] not in ROLES:
                other = {**message, "content": f"{message.get('content')}."}
                changed = replace(
                    self, messages=[*self.messages[:number], other, *self.messages[number + 1 :]]
                )
                if changed._text(len(self.messages)) == self._text(len(self.messages)):
                    problem = f"message {number} has the role {message['role']!r}, which the chat template leaves out"
                    raise RowFault(f"{problem}; the usual ones are {', '.join(ROLES)}")

    def after(self, count: int) -> tuple[str, Spans]:
        """Return the text, and the range after the first `count` messages."""
        text, before = self._text(len(self.messages)), self._text(count, prompt=True)
        if not text.startswith(before) or len(text) == len(before):
            raise RowFault("the chat template changes the prompt when an answer follows")
        return text, [(len(before), len(text))]

    def answers(self) -> tuple[str, Spans]:
        """Return the text and the ranges of all answers."""
        text, spans = self.template.tracked(self.messages, False, self.tools, self.more)
        if self.template.marks_answers:
            if not spans:
                raise RowFault("has no answer: the chat template marks no answer in it")
            return text, spans
        for number, message in enumerate(self.messages):
            if message["role"] == "assistant":
                begin = self._begin(text, number, spans[-1][1] if spans else 0)
                spans.append((begin, self._end(text, number)))
        return text, spans

    def _begin(self, text: str, number: int, floor: int) -> int:
        """Return where an answer begins: after what a prompt ends with, as far as the text has it."""
        before = self._text(number, prompt=True)
        if text.startswith(before):
            begin = len(before)
            if not number or self.messages[number - 1]["role"] in ("system", "user"):
                return begin
            # After the result of a tool, some templates write no header in a prompt, but one in a conversation.
            return next(
                (begin + len(header) for header in self._headers if text.startswith(header, begin)), begin
            )
        own, _ = self._place(len(self.messages), number)
        for header in self._headers:
            if (at := text.rfind(header, floor, own)) >= 0:
                return at + len(header)
        if not self.messages[number].get("content"):
            raise RowFault(f"{_CHANGES} the text before message {number} in a prompt; {_MARK}")
        return own

    def _end(self, text: str, number: int) -> int:
        """Return where an answer ends; the text that the template adds after an answer is included."""
        until = self._text(number + 1)
        if text.startswith(until):
            return len(until)
        # Some templates write the last answer in another way: with its reasoning, or with another end.
        (_, end), (_, own) = self._place(len(self.messages), number), self._place(number + 1, number)
        closing, rest = until[own:], text[end:]
        if rest.startswith(closing):
            return end + len(closing)
        common = _common(closing, rest)
        if not common and (tag := re.match(r"<[^<>\s]+>", rest)):
            common = len(tag[0])
        if not common:
            raise RowFault(f"{_CHANGES} message {number} when others follow; {_MARK}")
        return end + common

    def _place(self, count: int, number: int) -> tuple[int, int]:
        """Return the range, in the text of `count` messages, that depends on the content of an answer."""
        message = self.messages[number]
        given = [*self.messages[:number], _varied(message), *self.messages[number + 1 :]]
        text, varied = self._text(count), replace(self, messages=given)._text(count)
        if text == varied:
            raise RowFault(f"the chat template leaves out message {number}")
        begin = _equal(text, varied)
        return begin, len(text) - _equal(text[begin:][::-1], varied[begin:][::-1])

    @cached_property
    def _headers(self) -> list[str]:
        """Return the texts between a question and an answer, the longest first."""
        asked: dict[str, object] = {"role": "user", "content": "?"}
        answer: dict[str, object] = {"role": "assistant", "content": _VARIED}
        try:
            alone, last, first = (
                replace(self, messages=given)._text(len(given))
                for given in ([asked], [asked, answer], [asked, answer, asked])
            )
            prompt = replace(self, messages=[asked])._text(1, prompt=True)
        except TemplateError:
            return []
        begin = _common(alone, prompt)
        ends = (_common(prompt, last), _common(prompt, first))
        return [prompt[begin:end] for end in sorted(set(ends), reverse=True) if end > begin]


_CHANGES, _MARK = "the chat template changes", "mark answers in it with {% generation %}"
# A text that no answer has.
_VARIED = "\u2603"


def _common(first: str, second: str) -> int:
    """Return the length of the common beginning of two texts, without an incomplete `<tag`."""
    length = _equal(first, second)
    tag = re.search(r"<[^<>\s]*\Z", first[:length])
    return tag.start() if tag else length


def _equal(first: str, second: str) -> int:
    """Return the number of characters with which both texts begin."""
    pairs = enumerate(zip(first, second, strict=False))
    return next((at for at, pair in pairs if pair[0] != pair[1]), min(len(first), len(second)))


def _varied(message: dict[str, object]) -> dict[str, object]:
    """Return an answer with another content; if it has none, with another name of its first tool."""
    if content := message.get("content"):
        varied = [{"type": "text", "text": _VARIED}] if isinstance(content, list) else _VARIED
        return {**message, "content": varied}
    message = copy.deepcopy(message)
    calls = message["tool_calls"]
    assert isinstance(calls, list)
    calls[0].get("function", calls[0])["name"] = _VARIED
    return message


def _messages(value: object, name: str) -> list[dict[str, object]]:
    if not isinstance(value, list) or not value:
        raise RowFault(f"field {name!r} is not a list of messages")
    for number, message in enumerate(value):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise RowFault(f"field {name!r}: message {number} is not an object with a role")
        content, calls = message.get("content"), message.get("tool_calls")
        if not isinstance(content, (str, list)) and not (content is None and calls):
            raise RowFault(f"field {name!r}: message {number} has no content")
        first = (calls[0] if isinstance(calls, list) else None) if calls else {}
        if not isinstance(first, dict) or not isinstance(first.get("function", {}), dict):
            raise RowFault(f"field {name!r}: the tool_calls of message {number} are no list of calls")
        if message["role"] == "assistant" and content in ("", []) and not calls:
            raise RowFault(f"has no answer: the content of message {number} is empty")
    return value
