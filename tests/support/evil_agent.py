"""A node whose agent lies: `evil_agent.py MODE -I -S … -c 'import sys;exec(sys.stdin.buffer.read(N))'`.

It takes the launcher's greeting like an honest agent, waits for the first request, and then answers as its mode
says. Frames are made by hand, so that it can send what an honest agent never would.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import struct
import sys
import time
from collections.abc import Callable

MODES: dict[str, Callable[[], None]] = {}
# What a mode that seems endless sends in all.
MEGABYTES = 300
DEEP = b"[" * 50_000


def mode(function: Callable[[], None]) -> Callable[[], None]:
    MODES[function.__name__] = function
    return function


def say(data: bytes) -> None:
    sys.stdout.buffer.write(data)
    sys.stdout.buffer.flush()


def raw(header: bytes, payload: bytes = b"") -> bytes:
    return struct.pack(">BBII", 0x43, 1, len(header), len(payload)) + header + payload


def frame(kind: str, payload: bytes = b"", number: object = 1, fields: object = None) -> bytes:
    return raw(json.dumps([number, kind, {} if fields is None else fields]).encode(), payload)


def end(value: object) -> bytes:
    return frame("end", json.dumps(value).encode())


def data(payload: bytes, **fields: object) -> bytes:
    return frame("data", payload, fields=fields)


def file(path: str, content: bytes = b"x", mode: int = 0o644) -> list[object]:
    return [path, "f", mode, len(content), hashlib.sha256(content).hexdigest()]


def manifest(rows: object, content: bytes = b"xxxxxxxxxxxx") -> None:
    """Answer a pull with a manifest, then with bytes that nobody requested."""
    text = rows if isinstance(rows, bytes) else json.dumps(rows).encode()
    for begin in range(0, len(text), 1 << 17):
        say(data(text[begin : begin + (1 << 17)], manifest=len(text)))
    say(data(b"", ready=True))
    say(data(content))
    say(end({"path": "/etc/passwd", "is_folder": True, "warnings": []}))


# ---- answers to anything


@mode
def honest_end() -> None:
    say(data(b"fine\n", stream="stdout") + end({"exit_code": 0, "signal": None}))


@mode
def garbage() -> None:
    say(os.urandom(1000))


@mode
def cut_inside_a_frame() -> None:
    say(data(b"x" * 1000)[:500])
    sys.exit()


@mode
def huge_lengths() -> None:
    say(struct.pack(">BBII", 0x43, 1, 0xFFFFFFFF, 0xFFFFFFFF) + b"x" * 10_000)


@mode
def largest_length_and_nothing_behind() -> None:
    say(struct.pack(">BBII", 0x43, 1, 100, 16 << 20) + b"x")
    sys.exit()


@mode
def other_version() -> None:
    say(b"C\x02" + data(b"x")[2:])


@mode
def deep_header() -> None:
    say(raw(DEEP))


@mode
def header_of_other_types() -> None:
    say(raw(b'["1", 2, []]'))


@mode
def number_without_end() -> None:
    say(raw(b"[" + b"9" * 60_000 + b', "data", {}]'))


@mode
def credit_of_text() -> None:
    say(frame("credit", fields={"bytes": "many"}))


@mode
def credit_of_nothing() -> None:
    say(frame("credit", fields={"bytes": None}))


@mode
def credit_without_end() -> None:
    say(raw(b'[1, "credit", {"bytes": 1e999}]'))


@mode
def credit_of_a_list() -> None:
    say(frame("credit", fields={"bytes": [1]}))


@mode
def end_that_is_no_json() -> None:
    say(frame("end", b"\xff\xfe{"))


@mode
def end_that_is_no_object() -> None:
    say(end([1, 2]))


@mode
def end_that_is_deep() -> None:
    say(frame("end", DEEP))


@mode
def end_of_other_types() -> None:
    say(
        end({"exit_code": "zero", "signal": [9], "timed_out": {}, "path": 7, "unchanged": "x", "files": None})
    )


@mode
def end_with_huge_numbers() -> None:
    say(end({"exit_code": 10**30, "signal": -(10**30)}))


@mode
def end_with_nothing() -> None:
    say(end({}))


@mode
def fail_of_other_types() -> None:
    say(frame("fail", json.dumps({"kind": [], "message": {"a": 1}, "traceback": 7}).encode()))


@mode
def fail_that_is_no_json() -> None:
    say(frame("fail", b"{"))


@mode
def fail_with_escapes() -> None:
    text = "\x1b[2J\x1b]0;owned\x07\r\x9b31m\u202efake"
    say(frame("fail", json.dumps({"kind": text, "message": text, "traceback": text}).encode()))


@mode
def unknown_ids() -> None:
    for number in (0, -1, 2, 10**20, True, 999):
        for kind in ("data", "end", "fail", "credit", "eof", "cancel", "open", "nonsense"):
            say(frame(kind, b"{}", number=number))
    honest_end()


@mode
def end_twice_and_more() -> None:
    say(end({"exit_code": 0}) * 3 + data(b"more") * 3)


@mode
def unknown_kinds() -> None:
    say(frame("hello") + frame("") + frame("DATA", b"x" * 100))
    honest_end()


@mode
def streams_of_other_types() -> None:
    say(data(b"a", stream=7) + data(b"b", stream=None) + data(b"c", stream=["stdout"]) + data(b"d"))
    say(end({"exit_code": 0}))


@mode
def beyond_the_window() -> None:
    for _ in range(MEGABYTES):
        say(data(b"x" * (1 << 20), stream="stdout"))
    honest_end()


@mode
def empty_frames_without_end() -> None:
    piece = data(b"", want="x" * 50_000)
    for _ in range(MEGABYTES * 12):
        say(piece)
    honest_end()


@mode
def frames_for_nobody_without_end() -> None:
    piece = frame("data", b"x" * (1 << 20), number=77)
    for _ in range(MEGABYTES):
        say(piece)
    honest_end()


@mode
def silence_with_beats() -> None:
    while True:
        say(frame("beat", number=0))
        time.sleep(0.2)


# ---- greetings


@mode
def greeting_that_is_no_json() -> None:
    say(b"\nCLUSTERCTL-AGENT have {{{\n")


@mode
def greeting_that_is_deep() -> None:
    say(b"\nCLUSTERCTL-AGENT error " + DEEP + b"\n")


@mode
def greeting_with_escapes() -> None:
    say(b"\nCLUSTERCTL-AGENT error " + json.dumps("\x1b[2J\x07\x9b31m\u202e").encode() + b"\n")


@mode
def greeting_of_a_number() -> None:
    say(b"\nCLUSTERCTL-AGENT old 7\n")


@mode
def greeting_without_end() -> None:
    for _ in range(MEGABYTES * 8):
        say(b"x" * (128 << 10))


@mode
def last_words_with_escapes() -> None:
    sys.stderr.write("\x1b[2J\x1b]0;owned\x07 what?\n" * 20_000)
    sys.exit(3)


# ---- answers to a pull


@mode
def pull_outside() -> None:
    manifest([["..", "d", 0o755, 0, ""], file("../escaped")])


@mode
def pull_absolute() -> None:
    manifest([file(os.environ.get("EVIL_TARGET", "/tmp/evil-absolute"))])


@mode
def pull_dots_within() -> None:
    manifest([["a", "d", 0o755, 0, ""], file("a/../../escaped")])


@mode
def pull_link_outside() -> None:
    manifest([["out", "l", 0o777, 0, "../../.."], file("out/escaped")])


@mode
def pull_link_absolute() -> None:
    manifest([["out", "l", 0o777, 0, "/"], file("out/escaped")])


@mode
def pull_through_a_link() -> None:
    manifest([["d", "d", 0o755, 0, ""], ["out", "l", 0o777, 0, "d/../../.."], file("out/escaped")])


@mode
def pull_link_and_folder_of_one_name() -> None:
    manifest([["a", "l", 0o777, 0, "."], ["a", "d", 0o755, 0, ""], file("a/escaped")])


@mode
def pull_names_twice() -> None:
    manifest([file("a", b"1"), file("A", b"2"), file("a", b"3")])


@mode
def pull_null_in_a_name() -> None:
    manifest([file("a\0b")])


@mode
def pull_empty_names() -> None:
    manifest([file(""), file("a//b"), file("."), file("/")])


@mode
def pull_name_too_long() -> None:
    manifest([file("n" * 5000)])


@mode
def pull_half_characters() -> None:
    manifest([file("\ud800")])


@mode
def pull_setuid() -> None:
    manifest([file("root", mode=0o4755)])


@mode
def pull_sizes_below_nothing() -> None:
    manifest([["a", "f", 0o644, -5, ""], ["b", "f", 0o644, 1 << 70, ""], ["c", "f", 0o644, 1.5, ""]])


@mode
def pull_more_than_any_disk() -> None:
    manifest([["a", "f", 0o644, 1 << 59, "0" * 64]])


@mode
def pull_other_kinds() -> None:
    manifest([["dev", "c", 0o666, 0, "1:3"], ["fifo", "p", 0o666, 0, ""]])


@mode
def pull_no_rows() -> None:
    manifest({"rows": 1})


@mode
def pull_no_json() -> None:
    manifest(b"\xff[[")


@mode
def pull_deep() -> None:
    manifest(DEEP)


@mode
def pull_manifest_without_end() -> None:
    piece = data(b"[" * (1 << 17), manifest=1)
    for _ in range(MEGABYTES * 8):
        say(piece)
    honest_end()


@mode
def pull_manifest_of_many_small_values() -> None:
    manifest(b"[" + b"[]," * (80 << 20) + b"[]]")


@mode
def pull_other_content() -> None:
    manifest([file("a", b"right")], b"wrong")


@mode
def pull_less_than_promised() -> None:
    manifest([["a", "f", 0o644, 10_000_000, "0" * 64]], b"short")


@mode
def pull_more_than_promised() -> None:
    manifest([file("a", b"right")], b"right" + b"more" * 1000)


@mode
def pull_never_ready() -> None:
    say(data(b"[]", manifest=2) + end({}))


# ---- answers to a push


def want(places: object) -> None:
    text = places if isinstance(places, bytes) else json.dumps(places).encode()
    say(data(text, want=True))
    time.sleep(0.3)
    say(end({"path": "~/x", "unchanged": False, "files": 1}))


@mode
def want_what_is_not_there() -> None:
    want([0, 10**6])


@mode
def want_below_nothing() -> None:
    want([-1, -2])


@mode
def want_other_types() -> None:
    want(["0", None, {"a": 1}])


@mode
def want_no_list() -> None:
    want(7)


@mode
def want_half_numbers() -> None:
    want([0.5, True])


@mode
def want_deep() -> None:
    want(DEEP)


@mode
def want_no_json() -> None:
    want(b"\xff")


@mode
def want_the_same_again_and_again() -> None:
    want([0] * 100_000)


@mode
def want_twice() -> None:
    for _ in range(1000):
        say(data(b"[0]", want=True))
    time.sleep(0.3)
    say(end({"path": "x"}))


@mode
def push_path_with_escapes() -> None:
    say(end({"path": "\x1b[2J\x1b]0;owned\x07\u202e/x", "unchanged": True}))


def main() -> None:
    name = sys.argv[1]
    size = next(int(found[1]) for one in sys.argv if (found := re.search(r"buffer\.read\((\d+)\)", one)))
    sys.stdin.buffer.read(size)
    sys.stdin.buffer.readline()
    if name.startswith(("greeting_", "last_words")):
        MODES[name]()
        return
    say(b'\nCLUSTERCTL-AGENT have ""\n')
    seen = b""
    while b'"open"' not in seen:
        piece = os.read(0, 1 << 16)
        if not piece:
            return
        seen = (seen + piece)[-100_000:]
    MODES[name]()
    # Until the launcher hangs up.
    while os.read(0, 1 << 16):
        pass


if __name__ == "__main__":
    try:
        main()
    except BrokenPipeError:
        # The launcher has seen enough.
        os._exit(0)
