"""`python -m trainer generate`: streams one text to a terminal; writes JSON lines otherwise."""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from clusterctl.wire.requests import GenerateRequest, ModelOptions
from trainer.errors import InputError
from trainer.surrogates import half_in

if TYPE_CHECKING:
    from trainer.generate.decoder import Decoder
    from trainer.generate.sampling import Sampling

AHEAD = 256
"""How many texts may be generated ahead of the next one to write."""
# How many wrong lines of a file an error lists.
MOST_FAULTS = 10


def _cache_bytes(text: str) -> int:
    """Return the bytes of --cache, from a size such as 4GiB or a number of GB; raise an InputError."""
    from trainer.config.amounts import gigabytes

    is_number = re.fullmatch(r"[0-9]*\.?[0-9]+", text.strip())
    try:
        return int(gigabytes(float(text) if is_number else text) * 1e9)
    except ValueError as error:
        raise InputError(f"--cache {error}") from None


def load_decoder(
    checkpoint: Path, wanted: ModelOptions, most_running: int = 64, chat_template: Path | None = None
) -> Decoder:
    """Return the decoder of a checkpoint. With several ranks, only rank 0 returns.

    The other ranks compute their parts of the model until rank 0 closes the decoder; then their processes end.
    """
    from trainer.device import open_device
    from trainer.env import Env

    cache = None if wanted.cache is None else _cache_bytes(wanted.cache)
    own = Env.read()
    threads = wanted.threads or own.threads
    kind = wanted.device or own.device_kind
    device = open_device(kind, own.local_rank, own.local_world_size, threads, deterministic=False)
    from trainer.generate.loading import open_decoder
    from trainer.generate.ranks import Division, Ranks, follow
    from trainer.parallel.group import leave

    ranks = Ranks.join(own, device)
    decoder = open_decoder(
        checkpoint,
        wanted.tokenizer,
        wanted.weights,
        cache,
        most_running,
        ranks,
        Division(wanted.tensor, wanted.pipeline),
        wanted.base,
        chat_template,
        wanted.add_bos,
    )
    if not ranks.leads:
        if not follow(decoder.network, ranks):
            os._exit(0)
        leave(ranks.group, 0)
    return decoder


@contextmanager
def closing(decoder: Decoder) -> Iterator[None]:
    """Close the decoder after the `with` block, which ends the other ranks; with several ranks, end this process too.

    After an InputError the other ranks end with exit code 0, so that their lost connections are not reported as the
    cause.
    """
    from trainer.generate.ranks import Leader
    from trainer.parallel.group import leave

    try:
        yield
    except InputError:
        decoder.close(well=False)
        raise
    decoder.close()
    if isinstance(decoder.network, Leader):
        leave(decoder.network.ranks.group, 0)


def run(request: GenerateRequest) -> int:
    """Run the command; return exit code 0."""
    from trainer.device import prepare_threads
    from trainer.generate.sampling import Sampling

    prepare_threads()
    names = {item.name for item in fields(Sampling)}
    sampling = Sampling(**{name: value for name, value in vars(request.drawing).items() if name in names})
    prompts = _prompts(request)
    decoder = load_decoder(request.checkpoint, request.model)
    with closing(decoder):
        _generate(decoder, prompts, sampling, request)
    return 0


def _generate(
    decoder: Decoder, prompts: Iterator[Prompt], sampling: Sampling, request: GenerateRequest
) -> None:
    """Write the generated text of each prompt."""
    many = request.given.prompts is not None or request.prompt_line
    single = not many and len(request.given.prompt or [""]) == 1 and request.drawing.samples == 1
    plain = single and not request.json and request.drawing.logprobs is None and request.drawing.beams == 1
    if plain or (single and sys.stdout.isatty() and not request.json):
        _stream(decoder, next(prompts).text, sampling, request.drawing.truncate)
        return
    for line in _texts(decoder, prompts, sampling, request):
        sys.stdout.write(json.dumps(line, ensure_ascii=False) + "\n")
        sys.stdout.flush()


@dataclass(frozen=True)
class Prompt:
    """A prompt, and its place in the input for error messages."""

    place: str
    text: str


def _prompts(request: GenerateRequest) -> Iterator[Prompt]:
    """Return the prompts: first those of options, then those of a file or of stdin."""
    lines = [
        _prompt_of(line.encode("utf-8", "surrogateescape"), f"line {at}")
        for at, line in enumerate(request.prompt_line, 1)
    ]
    for at, text in enumerate(request.given.prompt, 1):
        if half := half_in(text):
            raise InputError(f"--prompt {at}: {half}")
    file = request.given.prompts
    given = [*request.given.prompt, *lines] or ([""] if file is None else [])
    if file is not None and file != "-":
        path, remedy = Path(file), "write one prompt per line; - reads stdin"
        if not file or path.is_dir() or not path.exists():
            problem = "is a folder" if file and path.is_dir() else "no such file"
            raise InputError(f"{file or '--prompts'}: {problem if file else 'is empty'}", remedy)
        # A pipe can be read only once: its lines are checked as they come.
        if path.is_file():
            _check_prompts(file)
    return _all_prompts(given, file)


def _check_prompts(file: str) -> None:
    """Check the whole file before generating; one error lists all wrong lines."""
    faults, hint, number = list[str](), "", 0
    with Path(file).open("rb") as stream:
        for number, line in enumerate(stream, 1):
            try:
                _prompt_of(line, f"{file}:{number}")
            except InputError as error:
                faults.append(error.message)
                hint = error.hint
    if not number:
        raise InputError(f"{file}: has no prompts", "write one in each line")
    if len(faults) > MOST_FAULTS:
        faults[MOST_FAULTS:] = [f"... and {len(faults) - MOST_FAULTS} more"]
    if faults:
        raise InputError("\n".join(faults), hint)


def _all_prompts(given: Sequence[str], file: str | None) -> Iterator[Prompt]:
    for number, text in enumerate(given, 1):
        yield Prompt(f"prompt {number}", text)
    if file is None:
        return
    name = "stdin" if file == "-" else file
    with sys.stdin.buffer if file == "-" else Path(file).open("rb") as stream:
        for number, line in enumerate(stream, 1):
            place = f"{name}:{number}"
            yield Prompt(place, _prompt_of(line, place))


def _prompt_of(line: bytes, where: str) -> str:
    """Return the prompt in a line, which is plain text or a JSON object with `prompt`."""
    try:
        text = line.decode("utf-8").rstrip("\r\n")
    except UnicodeDecodeError as error:
        raise InputError(f"{where}: not UTF-8: {error.reason}") from None
    if not text.startswith("{"):
        return text
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return text
    prompt = value.get("prompt") if isinstance(value, dict) else None
    if not isinstance(prompt, str):
        raise InputError(
            f'{where}: "prompt" is missing or not a text', 'write {"prompt": "..."}, or plain text'
        )
    if half := half_in(prompt):
        raise InputError(f"{where}: {half}")
    return prompt


def _stream(decoder: Decoder, prompt: str, sampling: Sampling, truncate: bool) -> None:
    """Write one text while it is generated; a GLM's text is written when all its blanks are filled in."""
    from trainer.generate.decoder import Text

    def show(text: str, _: object = None) -> None:
        sys.stdout.write(_visible(text) if sys.stdout.isatty() else text)
        sys.stdout.flush()

    if decoder.glm is not None:
        started, course = decoder.filling(prompt, sampling, Text(decoder.tokenizer))
        decoder.batcher.submit(started)
        decoder.run()
        show(course.text())
    else:
        ids = decoder.ids_of(prompt, truncate)
        show(prompt)
        sink = Text(decoder.tokenizer, sampling.stop, show)
        decoder.batcher.submit(decoder.continuation(ids, sampling, sink))
        decoder.run()
    show("\n")


def _visible(text: str) -> str:
    """Return the text without characters that control the terminal or the writing direction."""
    return "".join(char if char in "\n\t" or char.isprintable() else _escaped(char) for char in text)


def _escaped(char: str) -> str:
    return f"\\x{ord(char):02x}" if ord(char) < 256 else f"\\u{ord(char):04x}"


@dataclass
class _Pending:
    """A text that is still being generated."""

    line: Callable[[], dict[str, object]]
    done: bool = False

    def finish(self) -> None:
        self.done = True


def _texts(
    decoder: Decoder, prompts: Iterator[Prompt], sampling: Sampling, request: GenerateRequest
) -> Iterator[dict[str, object]]:
    """Yield a JSON object for each text, in the order of the prompts."""
    waiting: list[_Pending] = []
    exhausted = False
    while True:
        while not exhausted and len(waiting) < AHEAD:
            prompt = next(prompts, None)
            if prompt is None:
                exhausted = True
            else:
                for number in range(request.drawing.samples):
                    own = replace(sampling, seed=sampling.seed + number)
                    waiting.append(_checked(decoder, prompt, own, request))
        while waiting and waiting[0].done:
            yield waiting.pop(0).line()
        if not waiting and exhausted:
            return
        if waiting:
            decoder.batcher.step()


def _checked(decoder: Decoder, prompt: Prompt, sampling: Sampling, request: GenerateRequest) -> _Pending:
    """Start generating for a prompt; an error names the prompt's place."""
    try:
        return _submitted(decoder, prompt.text, sampling, request)
    except InputError as error:
        raise InputError(f"{prompt.place}: {error.message}", error.hint) from None


def _submitted(decoder: Decoder, prompt: str, sampling: Sampling, request: GenerateRequest) -> _Pending:
    from trainer.generate.decoder import Text

    sink = Text(decoder.tokenizer, sampling.stop)
    facts = {"checkpoint": str(request.checkpoint), "seed": sampling.seed}
    if decoder.found is not None:
        facts["step"] = decoder.found.step
    if decoder.glm is not None:
        started, course = decoder.filling(prompt, sampling, sink)

        def line() -> dict[str, object]:
            blanks = course.as_json()
            total = sum(len(blank.ids) for blank in course.blanks)
            return {"prompt": prompt, "text": course.text(), "tokens": total, "blanks": blanks, **facts}
    else:
        ids = decoder.ids_of(prompt, request.drawing.truncate)
        started = decoder.continuation(ids, sampling, sink)

        def line() -> dict[str, object]:
            ended = sink.reason.value if sink.reason else ""
            made: dict[str, object] = {"prompt": prompt, "text": prompt + sink.text, "completion": sink.text}
            made |= {"tokens": len(sink.tokens), "ended": ended, **facts}
            if sampling.logprobs is not None:
                made["logprobs"] = [_logprob(decoder, token) for token in sink.tokens]
            return made

    pending = _Pending(line)
    sink.on_end = pending.finish
    decoder.batcher.submit(started)
    return pending


def _logprob(decoder: Decoder, token: Any) -> dict[str, object]:
    text = decoder.tokenizer.decode
    top = [{"id": number, "text": text([number]), "logprob": value} for number, value in token.top]
    return {"id": token.id, "text": text([token.id]), "logprob": token.logprob, "top": top}
