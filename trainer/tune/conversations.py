"""Conversations, and prompts with completions, as text with the ranges to learn."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from trainer.chat_template import ChatTemplate, Spans, TemplateError
from trainer.errors import DataError
from trainer.evaluate.rows import check_faults, read_text

EXAMPLE = '{"messages": [{"role": "user", "content": "..."}, {"role": "assistant", "content": "..."}]}'
COMPLETION = '{"prompt": "...", "completion": "..."}'
FORMS = f"each line has the form {EXAMPLE} or {COMPLETION}"
ROLES = ("system", "user", "assistant", "tool")
"""The roles that chat templates usually have."""


class RowFault(Exception):
    """A fault in a row; the reader adds the file and the line."""


@dataclass(frozen=True)
class Marked:
    """A text and the ranges of its characters to learn; `ends`: an end-of-text token follows and is learned too."""

    line: int
    text: str
    spans: tuple[tuple[int, int], ...]
    ends: bool = False


def read_rows(
    file: Path, make: Callable[[int, Mapping[str, object]], list[Marked]], remedy: str = FORMS
) -> list[Marked]:
    """Return the results of `make` for each line of a file; raise one error with the faults of all lines."""
    made, faults = list[Marked](), list[str]()
    text = read_text(file, "correct train.tune: it needs files with a JSON object on each line")
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            if not isinstance(row, dict):
                raise RowFault("not a JSON object")
            made += make(number, row)
        except (RowFault, TemplateError) as error:
            faults.append(f"{file}:{number}: {error}")
        except (ValueError, RecursionError) as error:
            faults.append(f"{file}:{number}: not JSON: {error}")
    check_faults(faults, remedy)
    if not made:
        raise DataError(f"{file}: contains no examples", remedy)
    return made


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
                before = self._text(number, prompt=True)
                if not text.startswith(before):
                    problem = f"the chat template changes the text before message {number} in a prompt"
                    raise RowFault(f"{problem}; mark answers in it with {{% generation %}}")
                spans.append((len(before), self._end(text, number, len(before))))
        return text, spans

    def _end(self, text: str, number: int, begin: int) -> int:
        """Return where an answer ends; the text that the template adds after an answer is included."""
        until = self._text(number + 1)
        if text.startswith(until):
            return len(until)
        # Some templates remove the reasoning of all answers except the last one.
        content = str(self.messages[number].get("content") or "").strip()
        found, own = text.find(content, begin), until.rfind(content)
        closing = until[own + len(content) :]
        end = found + len(content) + len(closing)
        if not content or found < 0 or own < 0 or text[end - len(closing) : end] != closing:
            problem = f"the chat template changes message {number} when others follow"
            raise RowFault(f"{problem}; mark answers in it with {{% generation %}}")
        return end


def _messages(value: object, name: str) -> list[dict[str, object]]:
    if not isinstance(value, list) or not value:
        raise RowFault(f"field {name!r} is not a list of messages")
    for number, message in enumerate(value):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise RowFault(f"field {name!r}: message {number} is not an object with a role")
        content = message.get("content")
        if not isinstance(content, (str, list)) and not (content is None and message.get("tool_calls")):
            raise RowFault(f"field {name!r}: message {number} has no content")
        if message["role"] == "assistant" and content in ("", []) and not message.get("tool_calls"):
            raise RowFault(f"has no answer: the content of message {number} is empty")
    return value
