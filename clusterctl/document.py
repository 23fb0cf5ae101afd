"""Read YAML and JSON files strictly, and keep the line of every key for messages.

Differences from PyYAML, each because of a mistake that users made: `1e-4` is a number; `no`, `22:22`, `0010` and `1_0`
are text; a key given twice is an error; aliases, depth and size are bounded; no tag creates an object.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar, cast

from clusterctl.errors import Fault, InputFaults, UsageError, did_you_mean
from clusterctl.text import escape_controls
from clusterctl.wire.fields import BAD, EXAMPLES, WORDS, Key, Reader, shown

# The largest hand-written inventory that is known has 100 KB.
MAX_BYTES = 4 << 20
MAX_DEPTH = 40
MAX_NODES = 300_000
RIGHT_FILE = "is this the right file?"

T = TypeVar("T")

# PyYAML's scanner looks ahead a thousand characters at every level, which takes a second for deeply nested text.
_OPENINGS = re.compile(r"[\[{](?:\s*[\[{]){99}")
# A node set as a key of a flow mapping, without quotes: `{node[1-4]: {}}`.
_SET_IN_BRACES = re.compile(r"[{,]\s*[\w.-]+\[[^\]]*\]")
_INT = re.compile(r"[-+]?(0|[1-9][0-9]*)\Z")
_FLOAT = re.compile(r"[-+]?(\.[0-9]+|(0|[1-9][0-9]*)(\.[0-9]*)?)([eE][-+]?[0-9]+)?\Z")
_HALF = re.compile("[\ud800-\udfff]")
_CONSTANTS = {
    "": None,
    "~": None,
    "null": None,
    "Null": None,
    "true": True,
    "True": True,
    "false": False,
    "False": False,
}


@dataclass(frozen=True)
class Document:
    """A parsed file: its value, and the line of each key."""

    source: str
    value: Any
    lines: dict[Key, int] = field(repr=False)
    flags: frozenset[Key] = frozenset()
    """Keys set on the command line, including all keys below them."""
    included: Mapping[Key, Document] = field(default_factory=dict, repr=False, hash=False)
    """Files whose content stands at a key."""

    def where(self, path: Key) -> str:
        """Return a position such as `job.yaml:12 train.lr`; for an absent key the line of its parent."""
        for key, inner in self.included.items():
            if path[: len(key)] == key:
                return inner.where(path[len(key) :])
        name = ".".join(str(part) for part in path)
        if any(path[:n] in self.flags for n in range(1, len(path) + 1)):
            return f"--set {name}"
        line = next((self.lines[path[:n]] for n in range(len(path), -1, -1) if path[:n] in self.lines), 1)
        return f"{self.source}:{line}" + (f" {name}" if name else "")

    def fault(self, path: Key, problem: str, remedy: str = "") -> Fault:
        return Fault(self.where(path), problem, remedy)


def load_document(path: Path, maker: str = "clusterctl init") -> Document:
    """Read a file; raise InputFaults or UsageError, with its name, for any failure.

    `maker` is the command that writes such a file.
    """
    try:
        if path.stat().st_size > MAX_BYTES:
            raise UsageError(f"{path}: larger than {MAX_BYTES >> 20} MB", RIGHT_FILE)
        text = path.read_bytes().decode("utf-8-sig")
    except FileNotFoundError:
        raise UsageError(f"{path}: no such file", f"check the name, or write one with `{maker}`") from None
    except UnicodeDecodeError as error:
        raise UsageError(f"{path}: not UTF-8 text (byte {error.start})", "save the file as UTF-8") from None
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror or error}", "check the name and its permissions") from None
    return parse_document(text, str(path))


def _remedy_of(problem: str, lines: list[str]) -> str:
    """Return what to try about yaml's `problem` in `lines`, the line with the error or none at the end of the file."""
    line = lines[0] if lines else ""
    if "'\\t'" in problem:
        return "indent with spaces, not tabs"
    if _SET_IN_BRACES.search(line):
        return 'put a name with brackets in quotes: {"node[1-4]": ...}'
    return "check quotes, colons and the indentation"


def parse_document(text: str, source: str) -> Document:
    """Parse a text; `source` names it in messages."""
    import yaml

    if _OPENINGS.search(text):
        raise InputFaults([Fault(source, f"nested deeper than {MAX_DEPTH} levels", RIGHT_FILE)])
    try:
        root = _quick_tree(text) or yaml.compose(text, Loader=yaml.SafeLoader)
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else 1
        column = error.problem_mark.column + 1 if error.problem_mark else 1
        kind, remedy = "yaml", _remedy_of(error.problem or "", text.splitlines()[line - 1 : line])
        # DeepSpeed's settings and manifests of pods may be JSON, which YAML includes.
        if source.endswith(".json"):
            kind, remedy = "JSON", "check quotes, commas and brackets"
        fault = Fault(f"{source}:{line}:{column}", f"not valid {kind}: {error.problem}", remedy)
        raise InputFaults([fault]) from None
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        problem = f"not valid yaml: the character {escape_controls(chr(error.character))}"
        raise InputFaults(
            [Fault(f"{source}:{line}", problem, "delete it; in quotes, write it as \\x..")]
        ) from None
    except (yaml.YAMLError, ValueError) as error:
        raise InputFaults(
            [Fault(source, f"not valid yaml: {str(error).splitlines()[0]}", RIGHT_FILE)]
        ) from None
    except RecursionError:
        raise InputFaults([Fault(source, f"nested deeper than {MAX_DEPTH} levels", RIGHT_FILE)]) from None
    builder = _Builder(source)
    value = builder.build(root, ()) if root is not None else None
    if builder.faults:
        raise InputFaults(builder.faults)
    return Document(source, value, builder.lines)


def _quick_tree(text: str) -> Any:
    """Parse with libyaml, which is 12 times faster; return None if it is missing or finds an error.

    PyYAML's own parser then reports the error. Only the parser of libyaml is used: its composer recurses in C and
    crashes at 100,000 levels, while that of PyYAML raises.
    """
    import yaml
    from yaml.composer import Composer
    from yaml.resolver import Resolver

    if not yaml.__with_libyaml__:
        return None
    from yaml._yaml import CParser

    class Tree(Composer, CParser, Resolver):
        def __init__(self) -> None:
            CParser.__init__(self, text)
            Composer.__init__(self)
            Resolver.__init__(self)

    try:
        return Tree().get_single_node()
    except (yaml.YAMLError, ValueError):
        return None


class _Builder:
    """Builds plain values from the node tree of PyYAML, with the line of each."""

    def __init__(self, source: str) -> None:
        self.source = source
        self.lines: dict[Key, int] = {}
        self.faults: list[Fault] = []
        self.count = 0
        self.open: list[Any] = []

    def build(self, node: Any, path: Key) -> Any:
        self.lines.setdefault(path, node.start_mark.line + 1)
        self.count += 1
        if len(path) > MAX_DEPTH or self.count > MAX_NODES:
            if not self.faults:
                self.refuse(
                    node, "too large or too deep once its aliases are followed", "write fewer aliases"
                )
            return None
        if node.id == "scalar":
            return self.scalar(node)
        if node.tag not in ("tag:yaml.org,2002:map", "tag:yaml.org,2002:seq"):
            return self.refuse(node, f"the tag {node.tag} is not allowed here", "write a plain value")
        if any(node is parent for parent in self.open):
            return self.refuse(node, "an alias refers to a value that contains it", "write the value out")
        self.open.append(node)
        value = self.collection(node, path)
        self.open.pop()
        return value

    def collection(self, node: Any, path: Key) -> Any:
        if node.id == "sequence":
            return [self.build(item, (*path, index)) for index, item in enumerate(node.value)]
        return self.mapping(node, path)

    def mapping(self, node: Any, path: Key) -> dict[str, object]:
        result: dict[str, object] = {}
        for key_node, value_node in node.value:
            if key_node.id != "scalar":
                self.refuse(key_node, "a key must be a word", "as in {key: value}")
                continue
            key = str(key_node.value)
            if _HALF.search(key):
                self.refuse(key_node, "half of a surrogate pair is not a character", "write the character")
                continue
            if key in result:
                self.refuse(key_node, f"the key {key!r} is given twice", "keep one of them")
            path_to_key: Key = (*path, key)
            self.lines[path_to_key] = key_node.start_mark.line + 1
            result[key] = self.build(value_node, path_to_key)
        return result

    def scalar(self, node: Any) -> Any:
        text = node.value
        if _HALF.search(text):
            return self.refuse(node, "half of a surrogate pair is not a character", "write the character")
        if node.style in ("'", '"', "|", ">") or (
            node.tag == "tag:yaml.org,2002:str" and not _looks_plain(text)
        ):
            return text
        if node.tag.startswith("!") or node.tag.startswith("tag:yaml.org,2002:python"):
            return self.refuse(node, f"the tag {node.tag} is not allowed here", "write a plain value")
        if text in _CONSTANTS:
            return _CONSTANTS[text]
        if _INT.match(text):
            # A longer one is no number of any key, and a text such as an account keeps its digits.
            return int(text) if len(text) < 20 else text
        if _FLOAT.match(text) and len(text) < 40:
            number = float(text)
            return (
                number
                if math.isfinite(number)
                else self.refuse(node, f"{text} is too large a number", "at most 1.7e308")
            )
        return text

    def refuse(self, node: Any, problem: str, remedy: str = "") -> None:
        self.faults.append(Fault(f"{self.source}:{node.start_mark.line + 1}", problem, remedy))


def _looks_plain(text: str) -> bool:
    return text in _CONSTANTS or bool(_INT.match(text) or _FLOAT.match(text))


# Names of variables with secret values, and values that are no secrets: a file, a number, a token of a vocabulary.
SECRET = re.compile(
    r"(TOKEN|SECRET|PASSWORD|PASSWD|PASSPHRASE|CREDENTIALS?|API_?KEY|ACCESS_?KEY|PRIVATE_?KEY)(_|\Z)",
    re.IGNORECASE,
)
NO_SECRET = re.compile(r".*(_FILE|_PATH|_DIR)|(PAD|EOS|BOS|UNK|MASK|SEP|CLS)_TOKEN(_.*)?", re.IGNORECASE)
HARMLESS = re.compile(r"|[0-9.]+|true|false|yes|no|on|off|none|\*+|<[^<>]*>", re.IGNORECASE)
# An address such as http://user:password@proxy:3128.
WITH_PASSWORD = re.compile(r"(?<=[a-z0-9+.-])://[^/@:\s]*:[^/@\s]+@", re.IGNORECASE)


def secrets_in(variables: Mapping[str, str]) -> list[str]:
    """Return the names of those variables that look like secrets, by their names or their values."""
    return [
        name
        for name, text in variables.items()
        if WITH_PASSWORD.search(text)
        or (SECRET.search(name) and not NO_SECRET.fullmatch(name) and not HARMLESS.fullmatch(text))
    ]


def recorded_secret(name: str) -> tuple[str, str]:
    """Return why the value of a variable must not be recorded, and how to pass it instead."""
    problem = f"{name} looks like a credential, and files, records and manifests would show it"
    return problem, f"forward: [{name}] in a job takes it from your environment, and is never recorded"


class Section:
    """Reads a mapping: each `take` returns a checked value, or records an error and returns the default."""

    def __init__(self, document: Document, path: Key = (), faults: list[Fault] | None = None) -> None:
        self.document, self.path = document, path
        self.faults: list[Fault] = faults if faults is not None else []
        self.taken: list[str] = []
        value = document.value
        for part in path:
            value = value[part]
        if value is not None and not isinstance(value, dict):
            self.fault("", f"must be a mapping, not {shown(value)}", EXAMPLES[dict])
            value = {}
        self.value: dict[str, object] = value or {}

    def fault(self, key: str, problem: str, remedy: str = "") -> None:
        self.faults.append(self.document.fault((*self.path, key) if key else self.path, problem, remedy))

    def take(self, key: str, kind: type[T], default: T | None = None, *, required: bool = False) -> T | None:
        """Return the value of a key, which must be of `kind`; an int is accepted as a float, but not as a bool."""
        self.taken.append(key)
        value = self.value.get(key)
        if value is None:
            if required:
                self.fault(key, f"{key!r} is missing", f"give {WORDS.get(kind, kind.__name__)}")
            return default
        if kind is float and isinstance(value, int) and not isinstance(value, bool):
            return cast(T, float(value))
        if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
            self.fault(
                key,
                f"must be {WORDS.get(kind, kind.__name__)}, not {shown(value)}",
                EXAMPLES.get(kind, ""),
            )
            return default
        return value

    def take_text(self, key: str, default: str = "") -> str:
        """Return text; a plain number becomes text (`port: 22` in an environment is "22")."""
        self.taken.append(key)
        value = self.value.get(key)
        if value is None:
            return default
        if isinstance(value, (dict, list)):
            self.fault(key, f"must be text, not {shown(value)}", "write one value, without brackets")
            return default
        return ("true" if value else "false") if isinstance(value, bool) else str(value)

    def section(self, key: str) -> Section:
        self.taken.append(key)
        if self.value.get(key) is None:
            return Section(Document(self.document.source, {}, {(): 1}), (), self.faults)
        return Section(self.document, (*self.path, key), self.faults)

    def done(self, elsewhere: Mapping[str, str] | None = None) -> None:
        """Record an error for every key that was not taken; `elsewhere` has a remedy for keys of other sections."""
        known = list(dict.fromkeys(self.taken))
        for key in self.value:
            if key not in known:
                remedy = (elsewhere or {}).get(key) or did_you_mean(key, known)
                self.fault(key, f"unknown key {key!r}", remedy or f"known keys: {', '.join(known)}")


def reader(document: Document, faults: list[Fault], folder: Path | None = None) -> Reader:
    """Return a reader of a document, which adds its faults to the list; a relative path is in `folder`."""
    return Reader(
        lambda key, problem, remedy: faults.append(document.fault(key, problem, remedy)), True, folder
    )


def take_env(reader: Reader, raw: object, key: Key) -> object:
    """Return a mapping from environment variables to texts; every problem is reported."""
    if not isinstance(raw, dict):
        reader.report(key, f"must be a mapping, not {shown(raw)}", EXAMPLES[dict])
        return BAD
    found = dict[str, str]()
    for name, value in raw.items():
        if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
            problem = f"{name!r} is not a valid name of an environment variable"
            reader.report((*key, name), problem, "use letters, digits and _")
        elif value is None:
            remedy = f"write {name}: '' for an empty value, or `forward: [{name}]` in a job for yours"
            reader.report((*key, name), "has no value", remedy)
        elif isinstance(value, (dict, list)):
            reader.report(
                (*key, name), f"must be text, not {shown(value)}", "write one value, without brackets"
            )
        else:
            found[name] = ("true" if value else "false") if isinstance(value, bool) else str(value)
    for name in secrets_in(found):
        reader.report((*key, name), *recorded_secret(name))
    return found
