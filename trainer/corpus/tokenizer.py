"""Byte-level BPE as in GPT-2: trained here, or loaded from tokenizer.json or from vocab.json and
merges.txt."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from reprlib import repr as shown
from typing import TYPE_CHECKING, Any

from trainer.errors import DataError, InputError
from trainer.files import replace_file, sha256
from trainer.json_types import JsonObject
from trainer.side_files import TOKENIZER as FILE
from trainer.side_files import TOKENIZER_CONFIG, SideFiles

if TYPE_CHECKING:
    # A training without texts needs no tokenizer: the functions that make one import the package.
    import tokenizers

END_OF_DOCUMENT = "<|endoftext|>"
# The 256 bytes, and the end-of-document token.
SMALLEST_VOCAB = 256 + 1
# Ids are signed 32-bit integers.
LARGEST_VOCAB = 2**31 - 1
WRITTEN_BY = "name a tokenizer.json of Hugging Face, or train one with `clusterctl data tokenizer train`"
# Suffixes of SentencePiece's own files.
SENTENCEPIECE = (".model", ".spm")
CONVERTED_BY = "transformers writes it: AutoTokenizer.from_pretrained(DIR).save_pretrained(DIR)"
PAIRS = (("vocab.json", "merges.txt"), ("gpt2-vocab.json", "gpt2-merges.txt"))
GLM_TOKENS = {
    "sop": "<|startofpiece|>",
    "eop": "<|endofpiece|>",
    "cls": "[CLS]",
    "mask": "[MASK]",
    "sep": "[SEP]",
    "unk": "[UNK]",
    "gmask": "[gMASK]",
    "smask": "[sMASK]",
    "dblock": "<|dblock|>",
}
"""GLM's special tokens in the order of their ids, which follow the vocabulary: 50257 to 50265 with GPT-2's."""


class Tokenizer:
    """Converts text to token ids and back."""

    def __init__(self, inner: tokenizers.Tokenizer, eod: int, sha256: str = "", source: str = "") -> None:
        self._inner = inner
        self.eod = eod
        """The id of the token that ends a document of a corpus."""
        self.sha256 = sha256
        """SHA-256 of the file it was loaded from; for two files, of the vocabulary's bytes and then the merges'."""
        self.source = source

    @cached_property
    def vocab(self) -> int:
        """The size of the vocabulary: ids are in [0, vocab)."""
        return max(self._inner.get_vocab(with_added_tokens=True).values()) + 1

    @cached_property
    def longest(self) -> int:
        """The most bytes of text that one token stands for; 0 if that is not known."""
        if self._inner.normalizer is not None:
            # A normalizer may remove parts of a text.
            return 0
        return max(len(token.encode()) for token in self._inner.get_vocab(with_added_tokens=True))

    @classmethod
    def load(cls, path: Path, eod: str = "") -> Tokenizer:
        """Load tokenizer.json, vocab.json (with merges.txt next to it), or a folder that contains one of
        them.

        `eod` names the token that ends a document, if that is not <|endoftext|>.
        """
        files = _files(path)
        inner = _from_pair(*files) if len(files) == 2 else _from_text(_checked(files[0]))
        name = eod or _own_end(inner, files[0])
        number = inner.token_to_id(name) if name else None
        if number is None:
            missing = f"no token {eod!r}" if eod else f"no {END_OF_DOCUMENT} token"
            raise DataError(
                f"{path}: has {missing}",
                "name the token that ends a document with --eod, or train one with `clusterctl data tokenizer train`",
            )
        digest = hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()
        return cls(inner, number, digest, str(path))

    def definition(self) -> JsonObject:
        """Return the tokenizer in the form of tokenizer.json."""
        found: JsonObject = json.loads(self._inner.to_str())
        return found

    @cached_property
    def fingerprint(self) -> str:
        """The hash of what decides the ids of a text: vocabulary, merges and how words are split."""
        definition = self.definition()
        parts = [definition[name] for name in ("model", "normalizer", "pre_tokenizer")]
        return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()

    def id_of(self, token: str) -> int | None:
        """Return the id of a token by its spelling, or None."""
        number: int | None = self._inner.token_to_id(token)
        return number

    def token_of(self, number: int) -> str | None:
        token: str | None = self._inner.id_to_token(number)
        return token

    def added_at_start(self, text: str) -> int | None:
        """Return the id of the added token with which a text begins, or None."""
        ids, added = self.encode(text), self._inner.get_added_tokens_decoder()
        return ids[0] if ids and ids[0] in added else None

    @cached_property
    def side_files(self) -> SideFiles:
        """The files next to the tokenizer's own."""
        return SideFiles.beside(Path(self.source)) if self.source else SideFiles({})

    @cached_property
    def eos(self) -> int:
        """The id of the token that ends an answer: the tokenizer's `eos_token`, else the end of a document."""
        number = self.id_of(self.side_files.tokens.get("eos_token", ""))
        return self.eod if number is None else number

    @cached_property
    def bos(self) -> int | None:
        """The id of the tokenizer's `bos_token`, or None."""
        return self.id_of(self.side_files.tokens.get("bos_token", ""))

    def prefix(self, add_bos: bool | None = None) -> tuple[int, ...]:
        """Return the ids that precede a prompt: those that the tokenizer's post-processor puts there.

        `add_bos`: True also adds a `bos_token` that the post-processor leaves out, False adds nothing.
        """
        encoding = self._inner.encode("a", add_special_tokens=True)
        count = next((at for at, mark in enumerate(encoding.special_tokens_mask) if not mark), 0)
        found = tuple(encoding.ids[:count])
        if add_bos and not found:
            if self.bos is None:
                raise DataError(
                    f"{self.source}: has no bos_token",
                    "leave out --add-bos, or name it in tokenizer_config.json",
                )
            return (self.bos,)
        return () if add_bos is False else found

    def bytes_of(self, number: int) -> bytes:
        """Return the bytes of text that a token stands for; of an added token, its spelling."""
        token = self.token_of(number) or ""
        if number in self._inner.get_added_tokens_decoder():
            return token.encode()
        if self._spelled is not None and self._spelled.keys() >= set(token):
            return bytes(self._spelled[character] for character in token)
        hexadecimal = re.fullmatch(r"<0x([0-9A-F]{2})>", token)
        return bytes.fromhex(hexadecimal[1]) if hexadecimal else token.replace("▁", " ").encode()

    @cached_property
    def _spelled(self) -> dict[str, int] | None:
        """The byte of each character of a byte-level vocabulary; None for other kinds."""
        if '"ByteLevel"' not in json.dumps(self.definition().get("decoder")):
            return None
        return {character: byte for byte, character in enumerate(byte_characters())}

    def glm_ids(self) -> dict[str, int] | None:
        """Return GLM's special ids by name if the tokenizer has all of them, else None."""
        found = {name: self.id_of(token) for name, token in GLM_TOKENS.items()}
        whole = {name: number for name, number in found.items() if number is not None}
        return whole if len(whole) == len(GLM_TOKENS) else None

    def encode(self, text: str) -> list[int]:
        return list(self._inner.encode(text, add_special_tokens=False).ids)

    def encode_many(self, texts: Sequence[str]) -> list[list[int]]:
        return [
            encoding.ids for encoding in self._inner.encode_batch_fast(list(texts), add_special_tokens=False)
        ]

    def encode_with_offsets(self, texts: Sequence[str]) -> list[tuple[list[int], list[tuple[int, int]]]]:
        """Return, for each text, its ids and the characters that each id stands for."""
        found = self._inner.encode_batch(list(texts), add_special_tokens=False)
        return [(encoding.ids, encoding.offsets) for encoding in found]

    def decode(self, ids: Sequence[int]) -> str:
        return str(self._inner.decode(list(ids), skip_special_tokens=True))


def byte_characters() -> list[str]:
    """Return the character that represents each byte in a byte-level vocabulary; a printable byte is its own."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(0x100, 0x200))
    return [chr(byte if byte in printable else next(others)) for byte in range(256)]


# -- load ---------------------------------------------------------------------------------------------------


def tokenizer_files(path: Path) -> dict[str, Path]:
    """Return the files to copy to another folder for the same tokenizer, by the names that they need there."""
    files = _files(path)
    names = (FILE,) if len(files) == 1 else PAIRS[0]
    config = files[0].with_name(TOKENIZER_CONFIG)
    more = {TOKENIZER_CONFIG: config} if config.is_file() else {}
    return {**dict(zip(names, files, strict=True)), **more}


def single_file(path: Path, folder: Path) -> Path:
    """Return the tokenizer.json that a path names; for a vocabulary with merges, write one into `folder`."""
    files = _files(path)
    if len(files) == 1:
        return files[0]
    folder.mkdir(parents=True, exist_ok=True)
    replace_file(folder / FILE, json.dumps(Tokenizer.load(path).definition(), ensure_ascii=False).encode())
    return folder / FILE


def _files(path: Path) -> list[Path]:
    """Return the one or two files that a path names."""
    if path.is_dir():
        if (path / FILE).is_file():
            return [path / FILE]
        pairs = [[path / name for name in pair] for pair in PAIRS]
        found = next((pair for pair in pairs if all(file.is_file() for file in pair)), None)
        if found is None:
            raise DataError(
                f"{path}: has neither {FILE} nor {' and '.join(PAIRS[0])}", "name the tokenizer's file"
            )
        return found
    if not path.is_file():
        raise DataError(
            f"{path}: no such tokenizer",
            "train one with `clusterctl data tokenizer train`, or check the path",
        )
    if "vocab" in path.name and path.suffix == ".json":
        merges = path.with_name(path.stem.replace("vocab", "merges") + ".txt")
        if not merges.is_file():
            raise DataError(
                f"{merges}: no such file", f"the merges belong to {path.name}: put them in the same folder"
            )
        return [path, merges]
    return [path]


def _checked(path: Path) -> str:
    """Return the text of a tokenizer.json after checking its parts; for faults the library raises only
    Exception."""
    try:
        text = path.read_text(encoding="utf-8")
        model = json.loads(text)["model"]
        kind = model.get("type", "BPE")
        if kind == "Unigram" and _is_unigram(model):
            return text
        if kind != "BPE":
            whole = "of the kind" if kind != "Unigram" else "with damaged parts, of the kind"
            raise DataError(f"{path}: a tokenizer {whole} {kind}; BPE and Unigram can be read", WRITTEN_BY)
        sound = isinstance(model["vocab"], dict) and isinstance(model["merges"], list)
    except OSError as error:
        raise DataError(f"{path}: {error.strerror}", "check the owner and permissions of this file") from None
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        if path.suffix in SENTENCEPIECE:
            problem = f"{path}: a SentencePiece model, which cannot be read: name its tokenizer.json"
            raise DataError(problem, CONVERTED_BY) from None
        raise DataError(
            f"{path}: not a tokenizer.json ({type(error).__name__}: {error})", WRITTEN_BY
        ) from None
    if not sound:
        raise DataError(f"{path}: not a tokenizer.json of the BPE kind", WRITTEN_BY)
    merges = [merge.split(" ") if isinstance(merge, str) else merge for merge in model["merges"]]
    _check_parts(model["vocab"], merges, path, path)
    return text


def _from_text(text: str) -> tokenizers.Tokenizer:
    """Return the tokenizer of a tokenizer.json."""
    import tokenizers

    return tokenizers.Tokenizer.from_str(text)


def _byte_level(vocabulary: Mapping[str, int], merges: Sequence[tuple[str, str]]) -> tokenizers.Tokenizer:
    """Return a tokenizer that splits text as GPT-2's."""
    import tokenizers
    from tokenizers import decoders, models, pre_tokenizers

    inner = tokenizers.Tokenizer(models.BPE(dict(vocabulary), list(merges)))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    return inner


def _is_unigram(model: Mapping[str, object]) -> bool:
    """Return whether the parts of a Unigram model are sound: tokens with scores, and the id of the unknown token."""
    vocab, unknown = model.get("vocab"), model.get("unk_id")
    if not isinstance(vocab, list) or not vocab:
        return False
    pairs = all(
        isinstance(pair, list)
        and len(pair) == 2
        and isinstance(pair[0], str)
        and type(pair[1]) in (int, float)
        for pair in vocab
    )
    return pairs and (unknown is None or (type(unknown) is int and 0 <= unknown < len(vocab)))


def _from_pair(vocab_file: Path, merges_file: Path) -> tokenizers.Tokenizer:
    """Load GPT-2's two files, as other tools read them."""
    try:
        vocab = json.loads(vocab_file.read_text(encoding="utf-8"))
        lines = merges_file.read_text(encoding="utf-8").splitlines()
    except (OSError, ValueError, RecursionError) as error:
        raise DataError(
            f"{vocab_file}: not a vocabulary and its merges ({type(error).__name__}: {error})", WRITTEN_BY
        ) from None
    merges = [line.split(" ") for line in lines if line and not line.startswith("#version")]
    _check_parts(vocab, merges, vocab_file, merges_file)
    inner = _byte_level(vocab, [(left, right) for left, right in merges])
    if END_OF_DOCUMENT in vocab:
        inner.add_special_tokens([END_OF_DOCUMENT])
    return inner


def _check_parts(vocab: Any, merges: Any, vocab_file: Path, merges_file: Path) -> None:
    """Raise a DataError that names each invalid id and each merge of unknown tokens; the library would not
    name the place."""
    faults = []
    if not isinstance(vocab, dict) or not vocab:
        raise DataError(f"{vocab_file}: not a vocabulary: a mapping of tokens to ids is needed")
    wrong = [token for token, number in vocab.items() if type(number) is not int or not 0 <= number < 2**31]
    faults += [
        f"{vocab_file}: not a vocabulary: the id of {token!r} is {shown(vocab[token])}" for token in wrong[:5]
    ]
    for number, pair in enumerate(merges, 1):
        if (
            not isinstance(pair, (list, tuple))
            or len(pair) != 2
            or not all(isinstance(half, str) for half in pair)
        ):
            faults.append(f"{merges_file}: merge {number} is not two tokens: {shown(pair)}")
        elif not (pair[0] in vocab and pair[1] in vocab and pair[0] + pair[1] in vocab):
            faults.append(
                f"{merges_file}: merge {number} has a token that is not in {vocab_file.name}: {pair}"
            )
        if len(faults) >= 5:
            break
    if faults:
        raise DataError(
            "\n".join(faults), "the vocabulary and the merges belong to different tokenizers, or are damaged"
        )


def _own_end(inner: tokenizers.Tokenizer, file: Path) -> str:
    """Return GPT-2's name for the end of a document, or the one in tokenizer_config.json next to the file."""
    if inner.token_to_id(END_OF_DOCUMENT) is not None:
        return END_OF_DOCUMENT
    return SideFiles.beside(file).tokens.get("eos_token", "")


# -- make ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class WrittenTokenizer:
    """A tokenizer that was written to a file."""

    output: str
    vocab: int
    sha256: str
    eod: int
    eod_token: str
    asked_vocab: int | None = None
    """The requested size, if the tokenizer was trained."""
    glm: dict[str, int] | None = None
    """GLM's special ids by name, if they were added."""

    def as_json(self) -> JsonObject:
        return {key: value for key, value in asdict(self).items() if value is not None}


def train_tokenizer(
    texts: Iterator[str], vocab: int, output: Path, *, overwrite: bool = False
) -> WrittenTokenizer:
    """Train a vocabulary on texts; write `output`, and `<output>.info.json` with the eod id.

    An output whose name does not end in .json is a folder; it also gets vocab.json and merges.txt. Another tokenizer of
    that name is kept without `overwrite`.
    """
    if vocab < SMALLEST_VOCAB:
        raise InputError(
            f"a vocabulary of {vocab} is too small",
            f"use at least {SMALLEST_VOCAB}: 256 bytes and the end-of-document token",
        )
    if vocab > LARGEST_VOCAB:
        raise InputError(f"a vocabulary of {vocab} is too large", f"use at most {LARGEST_VOCAB}")
    from tokenizers import pre_tokenizers, trainers

    inner = _byte_level({}, [])
    trainer = trainers.BpeTrainer(
        vocab_size=vocab,
        special_tokens=[END_OF_DOCUMENT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    inner.train_from_iterator(texts, trainer)
    return replace(_write(inner, output, END_OF_DOCUMENT, overwrite), asked_vocab=vocab)


def add_glm_tokens(path: Path, output: Path, eod: str = "", *, overwrite: bool = False) -> WrittenTokenizer:
    """Write a copy of a tokenizer with GLM's special tokens after its last id."""
    tokenizer = Tokenizer.load(path, eod)
    existing = [token for token in GLM_TOKENS.values() if tokenizer.id_of(token) is not None]
    if existing:
        raise DataError(
            f"{path}: has {', '.join(existing)} already", "use it unchanged, or name a tokenizer without them"
        )
    inner = _from_text(json.dumps(tokenizer.definition()))
    inner.add_special_tokens(list(GLM_TOKENS.values()))
    end = tokenizer.token_of(tokenizer.eod) or ""
    return replace(_write(inner, output, end, overwrite), glm=Tokenizer(inner, 0).glm_ids())


def _write(inner: tokenizers.Tokenizer, output: Path, end: str, overwrite: bool) -> WrittenTokenizer:
    file = output if output.suffix == ".json" else output / FILE
    if not overwrite and file.is_file() and file.read_bytes() != inner.to_str().encode():
        problem = f"{file}: another tokenizer is there; data that it encoded would no longer fit"
        raise InputError(problem, "name another --output, or add --replace")
    file.parent.mkdir(parents=True, exist_ok=True)
    replace_file(file, inner.to_str().encode())
    if file is not output:
        _write_pair(json.loads(inner.to_str()), output, end)
    number = inner.token_to_id(end)
    assert number is not None
    made = WrittenTokenizer(str(file), inner.get_vocab_size(), sha256(file), number, end)
    info = {key: value for key, value in made.as_json().items() if key != "output"}
    replace_file(file.with_name(file.name + ".info.json"), json.dumps(info, indent=2).encode() + b"\n")
    return made


def _write_pair(definition: Mapping[str, Any], folder: Path, end: str) -> None:
    """Write vocab.json and merges.txt for tools that read those."""
    vocab = dict(definition["model"]["vocab"])
    vocab.update({token["content"]: token["id"] for token in definition["added_tokens"]})
    ordered = dict(sorted(vocab.items(), key=lambda item: item[1]))
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in definition["model"]["merges"]]
    replace_file(folder / "vocab.json", json.dumps(ordered, ensure_ascii=False).encode())
    replace_file(folder / "merges.txt", "\n".join(["#version: 0.2", *merges, ""]).encode())
