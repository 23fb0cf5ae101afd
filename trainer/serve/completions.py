"""OpenAI's /v1/completions."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from aiohttp import web

from trainer.errors import InputError
from trainer.generate.decoder import Decoder, Text
from trainer.generate.request import End, Request
from trainer.generate.sampling import Drawn, Sampling
from trainer.serve.faults import Fields, refused
from trainer.serve.runner import Stream, merged
from trainer.serve.sampling_fields import IGNORED, MOST_TEXTS, check_model, count_of, sampling_of, stream_of
from trainer.serve.service import Service, new_id


@dataclass(frozen=True)
class Order:
    """A validated request."""

    prompts: tuple[str | tuple[int, ...], ...]
    sampling: Sampling
    count: int
    echo: bool
    stream: bool
    with_usage: bool
    truncate: bool
    prefixed: bool
    """Whether the tokenizer's own tokens precede a prompt that is a text."""


@dataclass(frozen=True)
class Choice:
    """One text of an answer."""

    index: int
    prompt: str
    ids: tuple[int, ...]
    request: Request
    sink: Text


async def completions(service: Service, request: web.Request) -> web.StreamResponse:
    """Answer a request to continue prompts."""
    body = await service.body(request)
    order = read_order(Fields.read(body, IGNORED), service)
    choices = await service.encode(len(body), lambda: choices_of(order, service.decoder))
    service.reserve(request, [choice.request for choice in choices], in_pieces=order.stream)
    prompt_tokens = sum(len(choice.ids) for choice in choices[:: order.count])
    started = [(choice.request, choice.sink) for choice in choices]
    async with service.running(started, in_pieces=order.stream) as streams:
        frame = {
            "id": new_id("cmpl"),
            "object": "text_completion",
            "created": int(time.time()),
            "model": service.name,
        }
        if order.stream:
            return await service.events(
                request, _events(service, order, choices, streams, frame, prompt_tokens)
            )
        await service.texts(streams)
        made = [_choice(service.decoder, order, choice) for choice in choices]
        return web.json_response({**frame, "choices": made, "usage": service.usage(prompt_tokens, streams)})


def read_order(fields: Fields, service: Service) -> Order:
    """Return the validated request in a body, or raise one error with all faults."""
    check_model(fields, service.name)
    vocab = service.decoder.network.config.vocab
    logprobs = fields.whole("logprobs", -1) if fields.has("logprobs") else None
    sampling = sampling_of(fields, fields.whole("max_tokens", 16), logprobs, vocab)
    prompts = _prompts(fields)
    count = count_of(fields, sampling.beams)
    if count <= MOST_TEXTS < len(prompts) * count:
        fields.fault("prompt", f"{len(prompts)} prompts x {count} texts are more than {MOST_TEXTS}")
    fields.refuse("suffix", ("",), "a text after the completion is not supported")
    stream, with_usage = stream_of(fields)
    echo, truncate = fields.flag("echo"), fields.flag("truncate")
    prefixed = fields.flag("add_special_tokens", True)
    order = Order(prompts, sampling, count, echo, stream, with_usage, truncate, prefixed)
    fields.done()
    return order


def _prompts(fields: Fields) -> tuple[str | tuple[int, ...], ...]:
    """Return the prompts, given as a text, a list of texts, a list of ids, or a list of such lists."""
    value: Any = fields.raw("prompt")
    if value is None:
        fields.fault("prompt", "is missing")
        return ()
    if value == []:
        fields.fault("prompt", "is an empty list: at least one prompt is needed")
        return ()
    items = [value] if isinstance(value, str) or _is_ids(value) else value
    if not isinstance(items, list) or not items or not all(isinstance(i, str) or _is_ids(i) for i in items):
        fields.fault("prompt", "is not a text, a list of texts, a list of token ids, or a list of such lists")
        return ()
    return tuple(item if isinstance(item, str) else tuple(item) for item in items)


def _is_ids(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(type(item) is int for item in value)


def choices_of(order: Order, decoder: Decoder) -> list[Choice]:
    """Return the choices of all prompts, in the order of their indices."""
    found = list[Choice]()
    for at, prompt in enumerate(order.prompts):
        place = f"prompt[{at}]" if len(order.prompts) > 1 else "prompt"
        for number in range(order.count):
            sampling = replace(order.sampling, seed=order.sampling.seed + number)
            try:
                found.append(_choice_of(len(found), prompt, sampling, order, decoder))
            except InputError as error:
                remedy = error.hint.replace("--truncate", '"truncate": true')
                raise refused(error, place, "invalid_prompt", remedy) from None
    return found


def _choice_of(
    index: int, prompt: str | tuple[int, ...], sampling: Sampling, order: Order, decoder: Decoder
) -> Choice:
    sink = Text(decoder.tokenizer, sampling.stop)
    if decoder.glm is not None:
        text = prompt if isinstance(prompt, str) else decoder.tokenizer.decode(prompt)
        request, _ = decoder.filling(text, sampling, sink)
        return Choice(index, text, tuple(decoder.tokenizer.encode(text)), request, sink)
    if isinstance(prompt, str):
        ids, text = decoder.ids_of(prompt, order.truncate, prefixed=order.prefixed), prompt
    else:
        ids, text = decoder.checked(prompt, order.truncate), decoder.tokenizer.decode(prompt)
    scores = order.echo and sampling.logprobs is not None
    return Choice(index, text, tuple(ids), decoder.continuation(ids, sampling, sink, scores), sink)


def reason_of(sink: Text) -> str:
    """Return OpenAI's name of the reason why a text ended."""
    return "length" if sink.reason is End.LENGTH else "stop"


def _choice(decoder: Decoder, order: Order, choice: Choice) -> dict[str, object]:
    text = choice.prompt + choice.sink.text if order.echo else choice.sink.text
    tokens = choice.sink.drawn
    if order.echo and order.sampling.logprobs is not None:
        tokens = [Drawn(choice.ids[0], float("nan")), *choice.sink.prompt, *tokens]
    return {
        "index": choice.index,
        "text": text,
        "logprobs": None if order.sampling.logprobs is None else logprobs_of(decoder, tokens),
        "finish_reason": reason_of(choice.sink),
    }


def logprobs_of(decoder: Decoder, tokens: Sequence[Drawn]) -> dict[str, object]:
    """Return the log probabilities of tokens; NaN stands for the first token, which has none.

    A token that is a part of a character is spelled as `bytes:\\xNN`. An end token has an entry, but no text.
    """
    tokenizer = decoder.tokenizer
    texts = [token_text(tokenizer.bytes_of(token.id), "bytes:") for token in tokens]
    offset, offsets, top = 0, list[int](), list[dict[str, object] | None]()
    for token, text in zip(tokens, texts, strict=True):
        offsets.append(offset)
        offset += len(tokenizer.decode([token.id]))
        if token.logprob != token.logprob:
            top.append(None)
            continue
        entries: dict[str, object] = {}
        # Different ids may have the same text; the more likely one is first and stays.
        for number, value in token.top:
            entries.setdefault(token_text(tokenizer.bytes_of(number), "bytes:"), value)
        entries.setdefault(text, token.logprob)
        top.append(entries)
    values = [None if token.logprob != token.logprob else token.logprob for token in tokens]
    return {"tokens": texts, "token_logprobs": values, "top_logprobs": top, "text_offset": offsets}


def token_text(spelling: bytes, prefix: str = "") -> str:
    """Return the text of a token; of one that is a part of a character, `prefix` and its bytes as \\xNN."""
    try:
        return spelling.decode()
    except UnicodeDecodeError:
        return prefix + "".join(f"\\x{byte:02x}" for byte in spelling)


async def _events(
    service: Service,
    order: Order,
    choices: Sequence[Choice],
    streams: Sequence[Stream],
    frame: dict[str, object],
    prompt_tokens: int,
) -> AsyncIterator[dict[str, object]]:
    wants = order.sampling.logprobs is not None

    def chunk(choice: Choice, text: str, tokens: Sequence[Drawn], reason: str | None) -> dict[str, object]:
        logprobs = logprobs_of(service.decoder, tokens) if wants and tokens else None
        entry = {"index": choice.index, "text": text, "logprobs": logprobs, "finish_reason": reason}
        return {**frame, "choices": [entry]}

    echoed = set[int]()
    async for index, piece in merged(streams):
        choice = choices[index]
        if order.echo and index not in echoed:
            echoed.add(index)
            scored = [Drawn(choice.ids[0], float("nan")), *choice.sink.prompt] if wants else []
            yield chunk(choice, choice.prompt, scored, None)
        if piece is None:
            yield chunk(choice, "", (), reason_of(choice.sink))
        else:
            yield chunk(choice, *piece, None)
    if order.with_usage:
        yield {**frame, "choices": [], "usage": service.usage(prompt_tokens, streams)}
