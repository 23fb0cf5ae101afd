"""OpenAI's /v1/chat/completions: a chat template turns the messages into a prompt."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from aiohttp import web

from trainer.chat_template import ChatTemplate, TemplateError
from trainer.errors import InputError
from trainer.generate.decoder import Decoder, Text
from trainer.generate.request import Request
from trainer.generate.sampling import Drawn, Sampling
from trainer.serve.completions import reason_of, token_text
from trainer.serve.faults import ApiError, Fields, refused
from trainer.serve.runner import Stream, merged
from trainer.serve.sampling_fields import IGNORED, check_model, count_of, sampling_of, stream_of
from trainer.serve.service import Service, new_id

PLAIN = ChatTemplate(
    "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}",
    {},
)
"""For models whose tokenizer has no template."""
MOST_TEXT = 1 << 20
"""The most characters of a prompt that a template may produce."""


@dataclass(frozen=True)
class Order:
    """A validated request."""

    messages: Sequence[dict[str, object]]
    most: int
    """The most tokens of an answer; 0: as many as the window allows."""
    sampling: Sampling
    count: int
    stream: bool
    with_usage: bool
    more: Mapping[str, object]
    """Further values for the template."""
    prefixed: bool
    """Whether the tokenizer's own tokens precede the prompt; a template writes them itself."""


async def chat(service: Service, request: web.Request) -> web.StreamResponse:
    """Answer a list of messages."""
    body = await service.body(request)
    order = _read(Fields.read(body, IGNORED), service)
    prompt = render(service.template or PLAIN, order)
    started, length = await service.encode(len(prompt), lambda: _started(service.decoder, prompt, order))
    service.reserve(request, [own for own, _ in started], in_pieces=order.stream)
    async with service.running(started, in_pieces=order.stream) as streams:
        frame = {"id": new_id("chatcmpl"), "created": int(time.time()), "model": service.name}
        if order.stream:
            return await service.events(request, _events(service, order, streams, frame, length))
        await service.texts(streams)
        choices = [_choice(service.decoder, order, at, sink) for at, (_, sink) in enumerate(started)]
        usage = service.usage(length, streams)
        return web.json_response({**frame, "object": "chat.completion", "choices": choices, "usage": usage})


def _read(fields: Fields, service: Service) -> Order:
    check_model(fields, service.name)
    if service.decoder.glm is not None:
        raise ApiError(400, "a GLM fills in blanks and has no chat: use /v1/completions")
    top = fields.whole("top_logprobs", 0)
    logprobs = top if fields.flag("logprobs") else None
    if top and logprobs is None:
        fields.fault("top_logprobs", "needs logprobs true")
    most = fields.whole("max_completion_tokens", fields.whole("max_tokens", 0))
    vocab = service.decoder.network.config.vocab
    sampling = sampling_of(fields, most or 1, logprobs, vocab)
    messages = _messages(fields)
    for name in ("tools", "functions", "audio", "modalities", "prediction"):
        fields.refuse(name, ([], {}, ["text"]), "is not supported")
    fields.refuse("response_format", ({"type": "text"},), "only text is supported")
    fields.refuse("tool_choice", ("none", "auto"), "is not supported")
    stream, with_usage = stream_of(fields)
    more = fields.raw("chat_template_kwargs") or {}
    if not isinstance(more, dict):
        fields.fault("chat_template_kwargs", "is not an object")
    count, prefixed = (
        count_of(fields, sampling.beams),
        fields.flag("add_special_tokens", service.template is None),
    )
    order = Order(messages, most, sampling, count, stream, with_usage, more, prefixed)
    fields.done()
    return order


def _messages(fields: Fields) -> list[dict[str, object]]:
    value = fields.raw("messages")
    if not isinstance(value, list) or not value:
        fields.fault(
            "messages",
            "is missing" if value is None else "is not a list of at least one message with role and content",
        )
        return []
    found = list[dict[str, object]]()
    for number, message in enumerate(value):
        role = message.get("role") if isinstance(message, dict) else None
        content = _content(message.get("content")) if isinstance(message, dict) else None
        if not isinstance(role, str) or content is None:
            fields.fault(
                "messages", f"message {number} is not an object with a role and a text as its content"
            )
            return []
        found.append({**message, "content": content})
    return found


def _content(value: Any) -> str | None:
    """Return the text of a message, whose content is a text or a list of text parts; None if it is neither."""
    if isinstance(value, str):
        return value
    found = list[str]()
    for part in value if isinstance(value, list) else [None]:
        text = part.get("text") if isinstance(part, dict) and part.get("type") == "text" else None
        if not isinstance(text, str):
            return None
        found.append(text)
    return "".join(found)


def render(template: ChatTemplate, order: Order) -> str:
    """Return the prompt that a template makes; it runs in a sandbox and cannot reach Python's objects."""
    try:
        text = template.render(order.messages, prompt=True, more=order.more)
    except TemplateError as error:
        raise ApiError(400, error.message, "messages") from None
    if len(text) > MOST_TEXT:
        raise ApiError(400, f"the chat template turns the messages into {len(text)} characters", "messages")
    return text


def _started(decoder: Decoder, prompt: str, order: Order) -> tuple[list[tuple[Request, Text]], int]:
    try:
        ids = decoder.ids_of(prompt, prefixed=order.prefixed)
    except InputError as error:
        raise refused(
            error, "messages", "context_length_exceeded", "send fewer or shorter messages"
        ) from None
    base = replace(order.sampling, max_tokens=order.most or max(1, decoder.window - len(ids)))
    found = []
    for number in range(order.count):
        sampling = replace(base, seed=base.seed + number)
        sink = Text(decoder.tokenizer, sampling.stop)
        found.append((decoder.continuation(ids, sampling, sink), sink))
    return found, len(ids)


def _logprobs(decoder: Decoder, tokens: Sequence[Drawn]) -> dict[str, object]:
    def entry(number: int, value: float) -> dict[str, object]:
        spelling = decoder.tokenizer.bytes_of(number)
        return {"token": token_text(spelling), "logprob": value, "bytes": list(spelling)}

    content = [
        {**entry(token.id, token.logprob), "top_logprobs": [entry(*pair) for pair in token.top]}
        for token in tokens
    ]
    return {"content": content, "refusal": None}


def _choice(decoder: Decoder, order: Order, index: int, sink: Text) -> dict[str, object]:
    return {
        "index": index,
        "message": {"role": "assistant", "content": sink.text, "refusal": None},
        "logprobs": None if order.sampling.logprobs is None else _logprobs(decoder, sink.drawn),
        "finish_reason": reason_of(sink),
    }


async def _events(
    service: Service, order: Order, streams: Sequence[Stream], frame: dict[str, object], length: int
) -> AsyncIterator[dict[str, object]]:
    frame = {**frame, "object": "chat.completion.chunk"}

    def chunk(
        index: int, delta: dict[str, object], logprobs: dict[str, object] | None, reason: str | None
    ) -> dict[str, object]:
        entry = {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": reason}
        return {**frame, "choices": [entry]}

    for index in range(len(streams)):
        yield chunk(index, {"role": "assistant", "content": ""}, None, None)
    async for index, piece in merged(streams):
        if piece is None:
            yield chunk(index, {}, None, reason_of(streams[index].sink))
        else:
            own = _logprobs(service.decoder, piece[1]) if order.sampling.logprobs is not None else None
            yield chunk(index, {"content": piece[0]}, own, None)
    if order.with_usage:
        yield {**frame, "choices": [], "usage": service.usage(length, streams)}
