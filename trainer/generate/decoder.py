"""The decoder: a network, a tokenizer and a batcher that generate texts for many prompts at a time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from trainer.checkpoint.store import Checkpoint
from trainer.corpus.tokenizer import Tokenizer
from trainer.errors import InputError
from trainer.generate.batcher import Batcher
from trainer.generate.blanks import Filling
from trainer.generate.network import Network
from trainer.generate.ranks import Leader
from trainer.generate.request import Continuation, End, Request
from trainer.generate.sampling import Drawn, Sampling
from trainer.generate.text import Detokenizer, StopTexts
from trainer.samples.glm_windows import GlmTokens


@dataclass
class Text:
    """The text generated for one prompt; it is the batcher's sink."""

    tokenizer: Tokenizer
    stop: tuple[str, ...] = ()
    on_text: Callable[[str, Sequence[Drawn]], None] = lambda text, tokens: None
    """Called with each new piece of final text, and the tokens since the last call."""
    on_end: Callable[[], None] = lambda: None
    text: str = ""
    tokens: list[Drawn] = field(default_factory=list)
    prompt: list[Drawn] = field(default_factory=list)
    """The log probabilities of the prompt's tokens, from the second token on."""
    closing: Drawn | None = None
    """The end token, which is not part of the text."""
    reason: End | None = None
    message: str = ""

    def __post_init__(self) -> None:
        self._decode, self._stops = Detokenizer(self.tokenizer), StopTexts(self.stop)
        self._reported = 0

    def scored(self, prompt: Sequence[Drawn]) -> None:
        self.prompt = list(prompt)

    def token(self, drawn: Drawn) -> bool:
        self.tokens.append(drawn)
        self._pass_on(self._stops.push(self._decode.push(drawn.id)))
        return bool(self._stops.found)

    @property
    def drawn(self) -> list[Drawn]:
        """Return the tokens of the text and the end token."""
        return [*self.tokens, self.closing] if self.closing else self.tokens

    def end(self, reason: End, message: str = "", closing: Drawn | None = None) -> None:
        self.closing = closing
        if not self._stops.found:
            self._pass_on(self._stops.push(self._decode.end()) + self._stops.end(), last=True)
        self.reason, self.message = reason, message
        self.on_end()

    def _pass_on(self, text: str, last: bool = False) -> None:
        self.text += text
        if text or (last and self._reported < len(self.drawn)):
            self.on_text(text, self.drawn[self._reported :])
            self._reported = len(self.drawn)


class Decoder:
    """A network with its tokenizer and batcher."""

    def __init__(
        self,
        net: Network,
        tokenizer: Tokenizer,
        pages: int,
        glm: GlmTokens | None = None,
        found: Checkpoint | None = None,
        most_running: int = 64,
        ends: Sequence[int] = (),
        prefix: tuple[int, ...] = (),
    ) -> None:
        """`ends`: the ids that end a text, besides the end of a document. `prefix`: the ids that precede a prompt."""
        self.network, self.tokenizer, self.glm, self.found = net, tokenizer, glm, found
        self.prefix = prefix
        self.end_ids = tuple(dict.fromkeys([*ends, tokenizer.eod]))
        self.batcher = Batcher(net, pages, most_running)

    @property
    def window(self) -> int:
        """Return how many tokens a prompt and its text may have together."""
        return self.network.config.context

    def ids_of(self, prompt: str, truncate: bool = False, *, prefixed: bool = True) -> list[int]:
        """Return the token ids of a prompt; an empty prompt begins a new document.

        With `prefixed`, the prefix precedes them, unless the prompt already begins with it.
        """
        ids = self.encoded(prompt, truncate)
        first = self.prefix if prefixed and tuple(ids[: len(self.prefix)]) != self.prefix else ()
        if not ids and not first:
            ids = [self.tokenizer.eod if self.tokenizer.bos is None else self.tokenizer.bos]
        if truncate:
            ids = ids[max(0, len(first) + len(ids) - self.window) :]
        return self.checked([*first, *ids], truncate)

    def encoded(self, prompt: str, truncate: bool = False) -> list[int]:
        """Return the token ids of a text; `truncate`: of a text much longer than the window, only those of its end."""
        return self.tokenizer.encode(self._fitting(prompt, truncate))

    def _fitting(self, prompt: str, truncate: bool = False) -> str:
        """Return the prompt; refuse a prompt that cannot fit the window, which is faster than encoding it.

        `truncate`: return the end of the prompt instead, which has at least a window of tokens.
        """
        # A mask of a GLM has up to 7 characters.
        longest = max(self.tokenizer.longest, 7)
        most = self.window * longest
        if not self.tokenizer.longest or len(prompt) <= most:
            return prompt
        if truncate:
            # The first word may be cut: only the last ids of this text are used.
            return prompt[-2 * most :]
        raise InputError(
            f"the prompt has {len(prompt)} characters, but the model's context is {self.window} tokens of at most "
            f"{longest} bytes",
            "shorten it, or keep its end with --truncate",
        )

    def checked(self, ids: Sequence[int], truncate: bool = False) -> list[int]:
        """Return the ids of a prompt; refuse unknown ids, and too many ids unless `truncate` keeps the last ones."""
        vocab = self.network.config.vocab
        wrong = [number for number in ids if not 0 <= number < vocab]
        if wrong:
            raise InputError(f"token id {wrong[0]} is outside of the model's vocabulary: 0 to {vocab - 1}")
        if not ids:
            raise InputError("the prompt has no tokens", "give at least one")
        if len(ids) > self.window:
            if not truncate:
                raise InputError(
                    f"the prompt has {len(ids)} tokens, but the model's context is {self.window}",
                    "shorten it, or keep its end with --truncate",
                )
            ids = ids[-self.window :]
        return list(ids)

    def ends(self, sampling: Sampling) -> list[int]:
        """Return the ids that end a text."""
        return [*sampling.stop_ids, *([] if sampling.ignore_end else self.end_ids)]

    def continuation(
        self, ids: Sequence[int], sampling: Sampling, sink: Text, score_prompt: bool = False
    ) -> Request:
        """Return the request to continue a prompt."""
        course = Continuation(ids, sampling, self.ends(sampling), self.window)
        return Request(course, sampling, sink, ids, score_prompt)

    def filling(self, prompt: str, sampling: Sampling, sink: Text) -> tuple[Request, Filling]:
        """Return the request to fill in a GLM's blanks, and the `Filling` that collects the results."""
        assert self.glm is not None
        if sampling.beams > 1:
            raise InputError("beam search can't fill in a GLM's blanks", "use --beams 1")
        prompt = self._fitting(prompt)
        course = Filling(self.network.config, self.tokenizer, self.glm, prompt, sampling)
        return Request(course, sampling, sink), course

    def close(self, *, well: bool = True) -> None:
        """End the other ranks that share the model. `well=False`: this rank ends with an error."""
        if isinstance(self.network, Leader):
            self.network.end(well=well)

    def run(self) -> None:
        """Compute until all requests have ended."""
        while not self.batcher.idle:
            self.batcher.step()
