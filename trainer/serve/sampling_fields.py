"""The sampling fields that completions and chat have in common."""

from __future__ import annotations

import secrets
from dataclasses import replace

from trainer.generate.sampling import Sampling
from trainer.serve.faults import ApiError, Fields

IGNORED = (
    "user",
    "service_tier",
    "store",
    "metadata",
    "safety_identifier",
    "prompt_cache_key",
    "skip_special_tokens",
    "parallel_tool_calls",
)
"""Fields of other servers that are accepted and have no effect."""
MOST_TEXTS = 128
# The name of each field in the API and in Sampling.
_NUMBERS = ("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")


def sampling_of(fields: Fields, max_tokens: int, logprobs: int | None, vocab: int) -> Sampling:
    """Return the sampling parameters of a request; faults are added to `fields`."""
    base = Sampling(max_tokens=max_tokens, logprobs=logprobs)
    top_k = fields.whole("top_k", 0)
    numbers = {name: fields.number(name, getattr(base, name)) for name in _NUMBERS}
    sampling = replace(
        base,
        **numbers,  # type: ignore[arg-type]
        # Some clients write -1 for "no limit".
        top_k=0 if top_k == -1 else top_k,
        no_repeat_ngram=fields.whole("no_repeat_ngram_size", 0),
        length_penalty=fields.number("length_penalty", 1.0),
        beams=fields.whole("beam_width", 1),
        stop=fields.texts("stop"),
        stop_ids=_ids(fields, "stop_token_ids", vocab),
        ignore_end=fields.flag("ignore_eos"),
        bias=_bias(fields, vocab),
        seed=fields.whole("seed", secrets.randbits(48)),
    )
    fields.faults_of(sampling, {"no_repeat_ngram": "no_repeat_ngram_size", "beams": "beam_width"})
    return sampling


def count_of(fields: Fields, beams: int) -> int:
    """Return how many texts each prompt gets; beam search returns one."""
    count = fields.whole("n", 1)
    if not 1 <= count <= MOST_TEXTS:
        fields.fault("n", f"{count} is out of range: 1 to {MOST_TEXTS}")
    elif count > 1 and beams > 1:
        fields.fault("n", f"{count} texts, but beam search (beam_width) returns one")
    fields.refuse("best_of", (count,), "only best_of = n is supported")
    return count


def stream_of(fields: Fields) -> tuple[bool, bool]:
    """Return whether the answer is streamed, and whether its last event contains the token counts."""
    stream, options = fields.flag("stream"), fields.raw("stream_options")
    if options is None:
        return stream, False
    if not isinstance(options, dict):
        fields.fault("stream_options", "is not an object")
        return stream, False
    if not stream:
        fields.fault("stream_options", "needs stream true")
    known = ("include_usage", "include_obfuscation")
    for name in options:
        if name not in known or not isinstance(options[name], bool):
            fields.fault(
                "stream_options", f"{name[:40]}: the options are {' and '.join(known)}, each true or false"
            )
            break
    return stream, options.get("include_usage") is True


def _ids(fields: Fields, name: str, vocab: int) -> tuple[int, ...]:
    value = fields.raw(name) or []
    if not isinstance(value, list) or not all(type(item) is int and 0 <= item < vocab for item in value):
        fields.fault(name, f"is not a list of token ids below {vocab}")
        return ()
    return tuple(value)


def _bias(fields: Fields, vocab: int) -> dict[int, float]:
    value = fields.raw("logit_bias") or {}
    found = dict[int, float]()
    if not isinstance(value, dict):
        fields.fault("logit_bias", "is not an object of token ids and numbers")
        return found
    for key, number in value.items():
        if not (_is_number(key) and int(key) < vocab) or type(number) not in (int, float):
            fields.fault("logit_bias", f"{key[:20]}: not a token id below {vocab} with a number")
            return {}
        found[int(key)] = float(number)
    return found


def _is_number(key: str) -> bool:
    """Return whether a key is the canonical form of a number, so that no two keys mean the same id."""
    return key.isascii() and key.isdecimal() and len(key) < 10 and key == str(int(key))


def check_model(fields: Fields, name: str) -> None:
    """Raise an ApiError if the request is for another model than the served one."""
    model = fields.text("model", name)
    if model != name:
        raise ApiError(
            404, f"the model {model[:100]!r} does not exist; use {name!r}", "model", "model_not_found"
        )
