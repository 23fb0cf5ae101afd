"""The small files next to a tokenizer: its special tokens, its chat template, and the tokens that end a text."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from trainer.errors import InputError

if TYPE_CHECKING:
    from trainer.chat_template import ChatTemplate

TOKENIZER = "tokenizer.json"
TOKENIZER_CONFIG, SPECIAL_TOKENS = "tokenizer_config.json", "special_tokens_map.json"
CHAT_TEMPLATE, GENERATION = "chat_template.jinja", "generation_config.json"
SIDE_FILES = (
    TOKENIZER,
    TOKENIZER_CONFIG,
    SPECIAL_TOKENS,
    GENERATION,
    CHAT_TEMPLATE,
    "added_tokens.json",
)
"""Files without tensors that an import copies, a training saves, and an export writes again."""
TOKEN_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


class Vocabulary(Protocol):
    """The part of a tokenizer that finds the ids of special tokens."""

    def id_of(self, token: str) -> int | None:
        """Return the id of a token by its spelling, or None."""

    def added_at_start(self, text: str) -> int | None:
        """Return the id of the added token with which a text begins, or None."""


class SideFiles:
    """The files next to a tokenizer, by their names; each is read when it is needed."""

    def __init__(self, files: Mapping[str, Path | bytes]) -> None:
        self.files = files

    @classmethod
    def beside(cls, *paths: Path) -> SideFiles:
        """Return the files in folders, or next to files; a name in several folders means the file in the first."""
        found = dict[str, Path | bytes]()
        for path in paths:
            folder = path if path.is_dir() else path.parent
            for name in SIDE_FILES:
                if (folder / name).is_file():
                    found.setdefault(name, folder / name)
        return cls(found)

    @cached_property
    def config(self) -> Mapping[str, object]:
        """The content of tokenizer_config.json; {} without one."""
        return self._object(TOKENIZER_CONFIG)

    @cached_property
    def generation(self) -> Mapping[str, object]:
        """The content of generation_config.json; {} without one."""
        return self._object(GENERATION)

    @cached_property
    def tokens(self) -> Mapping[str, str]:
        """The special tokens by the names that templates use, such as eos_token."""
        found = {}
        for document in (self._object(SPECIAL_TOKENS), self.config):
            for name in TOKEN_NAMES:
                value = document.get(name)
                value = value.get("content") if isinstance(value, dict) else value
                if isinstance(value, str):
                    found[name] = value
        return found

    def template(self, named: Path | None = None) -> ChatTemplate | None:
        """Return the chat template in the file `named`, else the tokenizer's, or None."""
        from trainer.chat_template import ChatTemplate, read_source

        neighbour = self.files.get(CHAT_TEMPLATE)
        if named is not None:
            source = read_source(named, check=True)
        elif isinstance(neighbour, Path):
            source = read_source(neighbour, check=False)
        else:
            source = _default(self.config.get("chat_template"))
        return ChatTemplate(source, self.tokens) if source else None

    def ends(self, vocabulary: Vocabulary, template: ChatTemplate | None = None) -> tuple[int, ...]:
        """Return the ids that end a text: those of generation_config.json, the tokenizer's `eos_token`, and the end
        of an answer in its chat template or in `template`."""
        named = self.generation.get("eos_token_id")
        found = [number for number in (named if isinstance(named, list) else [named]) if type(number) is int]
        own = self.tokens.get("eos_token")
        found += [number for number in (own and vocabulary.id_of(own),) if type(number) is int]
        template = template or self.template()
        after = vocabulary.added_at_start(template.after_answer().lstrip()) if template else None
        return tuple(dict.fromkeys([*found, *([] if after is None else [after])]))

    def _object(self, name: str) -> Mapping[str, object]:
        file = self.files.get(name)
        if file is None:
            return {}
        try:
            value = json.loads(file if isinstance(file, bytes) else file.read_bytes())
        except (OSError, ValueError, RecursionError) as error:
            raise InputError(f"{file!s}: {error}", "repair it, or name another tokenizer") from None
        return value if isinstance(value, dict) else {}


def _default(value: object) -> str:
    """Return the template, or of several templates the one named `default`."""
    if isinstance(value, list):
        named = {entry.get("name"): entry.get("template") for entry in value if isinstance(entry, dict)}
        value = named.get("default")
    return value if isinstance(value, str) else ""
