"""Five hundred texts that shells, terminals, parsers and file systems trip over; each would leave a canary where it
is executed."""

from __future__ import annotations

from itertools import cycle, islice

# Bytes of one argument that Linux takes, with the null byte behind it 128 KB.
LONGEST = (32 * 4096) - 1
# Bytes of a file's name.
NAME_LONGEST = 255


def texts(canary: str, count: int = 500) -> list[str]:
    """The same ones each time, all different; bytes that are no UTF-8 stand as surrogates, as in sys.argv."""
    run = f"touch {canary}"
    shell = [
        f"$({run})", f"`{run}`", f"; {run}", f"& {run} &", f"| {run}", f"|| {run}", f"&& {run}", f"\n{run}\n",
        f"'; {run}; '", f"'\"'\"'; {run}; '\"'\"'", f'"; {run}; "', f"\\'; {run}; \\'", f"$'\\n'{run}", f"<({run})",
        f"> {canary}", f">> {canary}", f"2> {canary}", f"< /dev/null > {canary}", f"${{x:-$({run})}}", f"$(({run}))",
        f"() {{ :; }}; {run}", f"!{run}", f"#{{`{run}`}}", f"\r\n{run}\r\n", f"EOF\n{run}\nEOF", f"\\\n{run}",
        f"a[$({run})]", f"${{IFS}}{run}", f"{{{run},{run}}}", f"eval {run}", f"~$({run})", f"%0a{run}",
        f"\x00{run}".replace("\x00", "\x01"), f"\x04{run}", f"\x1b]0;{run}\x07", f"`{run}`'`{run}`\"`{run}`",
    ]  # fmt: skip
    words = [
        "", " ", "  ", "\t", "\n", "\r", "\r\n", "\\", "\\\\", "\\n", "'", "''", "'\\''", '"', '""', "`", "$", "$$",
        "$?", "$0", "$1", "$@", "$*", "$HOME", "${HOME}", "$PATH", "~", "~root", "~+", "*", "?", "[a-z]*", "{a,b}",
        "{}", "{{}}", "#", "# comment", "!", "!!", "^", "%", "%s", "%n", "%%", "&", "&&", "|", ";", ";;", "<", ">",
        "(", ")", "[", "]", "[[", "=", "==", "a=b", ":", "::", ",", ".", "..", "../..", "/", "//", "-", "--", "---",
        "-n", "-e", "-c", "-rf", "-oProxyCommand=x", "--help", "--version", "-x=y", "--=", "-\n", "+", "@", "@all",
        "@file", "\x7f", "\x1b", "\x1b[2J", "\x1b[31mred", "\x07", "\x08\x08", "\x85", "\u2028", "\u2029", "\u202e",
        "\u200b", "\ufeff", "\ufffe", "😀", "👨‍👩‍👧‍👦", "日本語", "é", "e\u0301", "ß", "İ", "ﬁ", "\U0010ffff", "Ω" * 99,
        "\udcff", "\udcff\udcfe", "\udcc3", "a\udc80b", "\udced\udca0\udc80", "null", "true", "0", "NaN", "1e999",
        "0x10", "[]", '{"a":1}', "CLUSTERCTL-ONCE", "CLUSTERCTL-AGENT have", "EOF", "exit", "exec", "cd /",
        ":(){ :|:& };:",
        "x" * LONGEST, "'" * 30_000, "$" * 4_000, "\n" * 1_000, "\udcff" * 5_000, "é'" * 20_000,
    ]  # fmt: skip
    found = dict.fromkeys([*words, *shell])
    # Each dangerous piece again between harmless ones, at either end and doubled, until there are enough.
    frames = cycle(["a {} b", "-{}", "{}\n", "'{}'", '"{}"', "é{}", "\udcfe{}", "{} {}", "={}", "\\{}"])
    pieces = cycle([*shell, *(word for word in words if 0 < len(word) < 40)])
    for frame, piece in islice(zip(frames, pieces, strict=False), 3 * count):
        found.setdefault(frame.replace("{}", piece))
        if len(found) >= count:
            break
    return list(found)[:count]


def values(canary: str, count: int = 500) -> list[str]:
    """The same as variables' values: the longest leaves room for its name."""
    return [one[: LONGEST - 20] for one in texts(canary, count)]


def names(canary: str, count: int = 500) -> list[str]:
    """The same as names of files: what no name can hold left out, each with a number, since some systems fold case."""
    found = []
    for number, text in enumerate(texts(canary.replace("/", "_"), count)):
        tail = f".{number}".encode()
        name = text.replace("/", "_").encode("utf-8", "surrogateescape")[: NAME_LONGEST - len(tail)] + tail
        found.append(name.decode("utf-8", "surrogateescape"))
    return found
