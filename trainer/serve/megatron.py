"""Megatron's PUT /api with the same fields and rules; errors have a fitting HTTP status and a `message`."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass

from aiohttp import web

from trainer.errors import InputError
from trainer.generate.decoder import Decoder, Text
from trainer.generate.request import Continuation, Request, Taken
from trainer.generate.sampling import Sampling
from trainer.json_types import JsonObject
from trainer.serve.faults import ApiError, Fields, refused
from trainer.serve.service import Service


@dataclass(frozen=True)
class Order:
    """A validated request."""

    prompts: tuple[str, ...]
    sampling: Sampling
    logprobs: bool
    add_bos: bool
    no_newline_after_colon: bool
    seeded: bool


class WithoutNewline(Continuation):
    """A continuation that never has a newline after a colon."""

    def __init__(self, decoder: Decoder, prompt: Sequence[int], sampling: Sampling) -> None:
        super().__init__(prompt, sampling, decoder.ends(sampling), decoder.window)
        self._decoder, self._last = decoder, prompt[-1]
        self._newline = decoder.tokenizer.encode("\n")[:1]

    def banned(self) -> Sequence[int]:
        ends = self._decoder.tokenizer.decode([self._last]).endswith(":")
        return self._newline if ends else ()

    def take(self, number: int) -> Taken:
        self._last = number
        return super().take(number)


async def api(service: Service, request: web.Request) -> web.StreamResponse:
    """Answer a request as Megatron's text generation server does."""
    body = await service.body(request)
    order = read_order(Fields.read(body), service.decoder)
    started, prompts = await service.encode(len(body), lambda: _started(service.decoder, order))
    service.reserve(request, [own for own, _ in started])
    async with service.running(started) as streams:
        await service.texts(streams)
    if order.sampling.beams > 1:
        return web.json_response(_beams(service.decoder, prompts[0], started[0][0]))
    answer: JsonObject = {"text": [], "segments": [], "logprobs": [] if order.logprobs else None}
    for ids, (_, sink) in zip(prompts, started, strict=True):
        whole = [*ids, *(token.id for token in sink.tokens)]
        answer["text"].append(service.decoder.tokenizer.decode(ids) + sink.text)
        answer["segments"].append([service.decoder.tokenizer.decode([number]) for number in whole])
        if order.logprobs:
            answer["logprobs"].append([token.logprob for token in (*sink.prompt, *sink.tokens)])
    return web.json_response(answer)


def read_order(fields: Fields, decoder: Decoder) -> Order:
    """Return the validated request in a body, or raise one error with all faults."""
    if fields.has("max_len"):
        raise ApiError(400, "max_len is no longer used. Replace with tokens_to_generate", "max_len")
    if decoder.glm is not None:
        raise ApiError(400, "a GLM fills in blanks: use /v1/completions")
    add_bos = fields.flag("add_BOS")
    prompts = _prompts(fields, add_bos)
    logprobs = fields.flag("logprobs")
    count = fields.whole("tokens_to_generate", 64)
    if count < 0 or (count == 0 and not logprobs):
        fields.fault("tokens_to_generate", f"{count}: at least 1, or 0 with logprobs true")
    top_k, top_p = fields.whole("top_k", 0), fields.number("top_p", 0.0)
    temperature, decay, bound = (
        fields.number(name, default)
        for name, default in (("temperature", 1.0), ("top_p_decay", 0.0), ("top_p_bound", 0.0))
    )
    rules = (
        ("temperature", 0 < temperature <= 100, "above 0, at most 100"),
        ("top_k", 0 <= top_k <= 1000, "0 to 1000"),
        ("top_p", 0 <= top_p <= 1, "0 to 1"),
        ("top_p", not (top_k > 0 and top_p > 0), "top_k and top_p cannot both be given"),
        ("top_p_decay", 0 <= decay <= 1 and (not decay or top_p > 0), "0 to 1, and only with top_p"),
        ("top_p_bound", 0 <= bound <= top_p if bound else True, "above 0, at most top_p"),
    )
    for name, holds, need in rules:
        if not holds:
            fields.fault(name, need)
    beams = fields.whole("beam_width", 0) if fields.has("beam_width") else 1
    if beams < 1 or (beams > 1 and len(prompts) > 1):
        fields.fault("beam_width", "at least 1, and with one prompt only")
    stop = (("\n\n",) if fields.flag("stop_on_double_eol") else ()) + (
        ("\n",) if fields.flag("stop_on_eol") else ()
    )
    seeded = fields.has("random_seed")
    sampling = Sampling(
        max_tokens=max(0, count),
        temperature=temperature,
        top_k=top_k,
        top_p=top_p or 1.0,
        top_p_decay=decay,
        top_p_bound=bound,
        seed=fields.whole("random_seed", secrets.randbits(48)),
        stop=stop,
        stop_ids=(fields.whole("stop_token", -1),) if fields.has("stop_token") else (),
        beams=max(1, beams),
        length_penalty=fields.number("length_penalty", 1.0),
        logprobs=0 if logprobs else None,
    )
    vocab = decoder.network.config.vocab
    if any(not 0 <= number < vocab for number in sampling.stop_ids):
        fields.fault("stop_token", f"is not a token id below {vocab}")
    if sampling.seed < 0:
        fields.fault("random_seed", "at least 0")
    fields.faults_of(sampling, {"beams": "beam_width", "seed": "random_seed"})
    fields.flag("no_log")
    colon = fields.flag("prevent_newline_after_colon")
    fields.done()
    return Order(prompts, sampling, logprobs, add_bos, colon, seeded)


def _prompts(fields: Fields, add_bos: bool) -> tuple[str, ...]:
    value = fields.raw("prompts")
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        fields.fault("prompts", "is not a list of texts" if value is not None else "is missing")
        return ()
    if not 1 <= len(value) <= 128:
        fields.fault("prompts", f"{len(value)} prompts: 1 to 128 are needed")
    if "" in value and not add_bos:
        fields.fault("prompts", "an empty prompt needs add_BOS true")
    return tuple(value)


def _started(decoder: Decoder, order: Order) -> tuple[list[tuple[Request, Text]], list[list[int]]]:
    found, prompts = [], []
    for number, prompt in enumerate(order.prompts):
        sampling = order.sampling
        if not order.seeded:
            sampling = Sampling(**{**sampling.__dict__, "seed": sampling.seed + number})
        tokenizer = decoder.tokenizer
        own = [tokenizer.eod if tokenizer.bos is None else tokenizer.bos] if order.add_bos else []
        try:
            ids = decoder.checked([*own, *decoder.encoded(prompt)])
        except InputError as error:
            raise refused(error, f"prompts[{number}]", remedy="shorten it") from None
        sink = Text(decoder.tokenizer, sampling.stop)
        request = decoder.continuation(ids, sampling, sink, order.logprobs)
        if order.no_newline_after_colon:
            request.course = WithoutNewline(decoder, ids, sampling)
        found.append((request, sink))
        prompts.append(ids)
    return found, prompts


def _beams(decoder: Decoder, prompt: Sequence[int], request: Request) -> JsonObject:
    texts = [[*prompt, *ids] for ids, _ in request.beams]
    return {
        "text": [decoder.tokenizer.decode(ids) for ids in texts],
        "segments": [[decoder.tokenizer.decode([number]) for number in ids] for ids in texts],
        "scores": [score for _, score in request.beams],
    }
