"""What a node's /bin/sh reads to run one command without an agent.

The login shell gets one constant line; all that is a user's stands in the script, quoted for /bin/sh alone. The
command takes the shell's place, so that its exit code or signal is the session's. Beside it a watcher reads what
is left of the input: when that ends, or brings no sign of life for long, the watcher ends the command and all
that carries its marker. dash, bash and busybox's ash read it alike; it costs one fork and no other program.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from clusterctl.agent.child import MARKER, POLITE
from clusterctl.agent.frames import AGENT_SILENCE
from clusterctl.agent.watcher import ENDING

LINE = "exec /bin/sh"  # every login shell understands it: sh, csh and fish alike
MARK = "CLUSTERCTL-ONCE"  # stands before the command's own output on both streams
KILLING = 5.0  # seconds after which the watcher gives up on what the kernel itself holds
CARRIED = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
SHELLS_OWN = re.compile(
    "_|BASH.*|COMP_WORDBREAKS|DIRSTACK|EPOCH.*|EUID|FUNCNAME|GROUPS|HISTCMD|LINENO|OPTIND|PIPESTATUS|PPID|"
    "S?RANDOM|SECONDS|SHELLOPTS|SHLVL|UID"
)  # variables that one shell or another lets nobody set, or sets anew
SSH_NAMES = "SSH_CLIENT SSH_CONNECTION SSH_TTY SSH_AUTH_SOCK SSH_ORIGINAL_COMMAND SSH_USER_AUTH"

# What the shell reads first. $$ is the command, whose place the shell leaves; $k its marker, which no environment
# holds but the command's and its children's; the watcher is in the command's group too. Each line of input is a
# sign of life, and winds the timer of $S seconds up anew. The braces make a shell read all of it before it starts
# the watcher, which reads the same input.
WATCHER = (
    "\n{"
    + ENDING
    + r"""q=$$
exec 3<&0
(trap '' HUP INT QUIT TERM PIPE
exec >/dev/null 2>&1
t= w=
while read -r x <&3;do
[ "$t" ]&&kill -USR1 $t
read -r w _ </proc/self/stat
(sleep $S 3<&-&
s=$!;trap 'kill -KILL $s;exit' USR1;exec 3<&-;wait $s;e)&
t=$!
done
[ "$t" ]&&kill -USR1 $t
read -r l </proc/$$/stat||exit
case ${l##*) } in [ZX]*)exit;;esac
e)&
"""
)


def carries(argv: Sequence[str], env: Mapping[str, str]) -> bool:
    """Whether /bin/sh gives a command exactly this argv and environment; else the agent has to."""
    names_fit = all(CARRIED.fullmatch(name) and not SHELLS_OWN.fullmatch(name) for name in env)
    return names_fit and bool(argv[0]) and not argv[0].startswith("-")


def script(
    argv: Sequence[str],
    env: Mapping[str, str],
    marker: str,
    cwd: str | None = None,
    silence: float = AGENT_SILENCE,
) -> bytes:
    """What /bin/sh reads: the watcher, the mark, and the command in the shell's place."""
    limits = f"k={MARKER}={marker} P={POLITE:.0f} L={POLITE + KILLING:.0f} S={silence:.0f}"
    home, program = _at_home(argv[0])
    exports = "".join(f"export {name}={_quoted(value)}\n" for name, value in env.items())
    words = " ".join([program, *map(_quoted, argv[1:])])
    folder = _folder(cwd) if cwd else ""
    text = (
        f"{limits}{WATCHER}"
        f"cd {folder} >/dev/null 2>&1&&y=ok||y=no-folder\n"
        f"printf '%s\n' '{MARK} {marker}'>&2\n"
        f"printf '%s\n' \"{MARK} {marker} $y\"\n"
        "[ $y = ok ]||exit 1\n"
        f"{home}unset {SSH_NAMES} OLDPWD\n"
        f"{exports}export {MARKER}={marker}\n"
        f"exec {words} </dev/null 3<&-\n}}\n"
    )
    return text.encode("utf-8", "surrogateescape")


def _quoted(text: str) -> str:
    return "'" + text.replace("'", "'\\''") + "'"


def _at_home(program: str) -> tuple[str, str]:
    """`~/` is the login's home in the program's own name, whatever HOME the command is given."""
    if program.startswith("~/"):
        return "h=$HOME\n", '"$h"/' + _quoted(program[2:])
    return "", _quoted(program)


def _folder(path: str) -> str:
    if path == "~" or path.startswith("~/"):
        return '"$HOME"' + (_quoted(path[1:]) if path[1:] else "")
    return _quoted(path if path.startswith("/") else f"./{path}")
