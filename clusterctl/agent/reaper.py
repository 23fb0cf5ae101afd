"""End the commands of an agent that was killed: a shell waits for the end of a pipe from the agent, and then ends them.

Runs on nodes: standard library only, Python 3.8 and newer.
"""

from __future__ import annotations

import itertools
import os
import subprocess
import threading
from io import FileIO
from typing import Dict, List, Optional, Tuple

from clusterctl.agent.spawn import start

MARKER = "CLUSTERCTL_EXEC"
# Seconds between SIGTERM and SIGKILL.
POLITE = 2.0
# Seconds for the last output, if the command left a process behind that keeps its pipes open.
AFTERMATH = 0.5

# Shell functions. e ends group $q and all that carries the marker $k: politely for $P seconds, then by force until
# $L, but never itself or $w. A read from /proc/self tells a subshell its own number. All that it starts has to ignore
# TERM. One grep looks for group and marker (a shell that reads 200 files of /proc itself takes 100 ms); where grep
# knows no -z (busybox), tr makes lines.
ENDING = r"""
e(){
read -r m _ </proc/self/stat
read -r b _ </proc/uptime
a=" "
while :;do
read -r n _ </proc/uptime
n=$((${n%.*}-${b%.*}))
p=
for f in $(g);do
f=${f#/proc/} f=${f%/*}
case $f in $m|$w)continue;;esac
kill -0 $f||continue
p=1
if [ $n -gt $P ];then kill -KILL $f
else case $a in *" $f "*);;*)kill -TERM $f;kill -CONT $f;a="$a$f ";;esac;fi
done
if [ ! "$p" ]||[ $n -gt $L ];then return;fi
sleep .1||sleep 1
done
}
g(){
r="\) [^ZX] [0-9]+ $q "
if printf 'a\0x\0'|grep -qzx x;then
grep -lszE "$r|^$k\$" /proc/[0-9]*/stat /proc/[0-9]*/environ
else
grep -lsE "$r" /proc/[0-9]*/stat
for f in /proc/[0-9]*;do tr '\0' '\n' <$f/environ|grep -qFx $k&&echo $f/;done
fi
}
"""

# Reads `+ GROUP:MARKER` and `- GROUP:MARKER`, and ends what is then still under way when the pipe ends. A marker that
# is a number stands behind $T: a shell reads byte by byte, and took 0.05 ms for the two lines of each command.
WATCH = (
    "P=2 L=7 w="
    + ENDING
    + r"""
trap '' HUP INT QUIT TERM PIPE
s=
while read -r c x;do
case $c in
+)s="$s $x ";;
-)s="${s%%" $x "*}${s#*" $x "}";;
esac
done
for x in $s;do q=${x%%:*} k=${x#*:};case $k in *=*);;*)k=$T$k;;esac;e& done
wait
"""
)


class Watcher:
    """The shell, started with the first command; without a shell, a killed agent leaves its commands running."""

    def __init__(self) -> None:
        self._token = os.urandom(16).hex() + "-"
        self._numbers = itertools.count(1)
        self._shell: "Optional[subprocess.Popen[bytes]]" = None
        self._orders: Optional[FileIO] = None
        self._change = threading.Lock()
        self._tried = False

    def marker(self) -> "Tuple[Dict[str, str], str]":
        """Return the variables that mark the next command and its children, and the short name of the marker."""
        number = str(next(self._numbers))
        return {MARKER: self._token + number}, number

    def watch(self, group: int, marker: str) -> None:
        """Watch a command: its process group, and NAME=VALUE in its environment, or the short name of that."""
        with self._change:
            if not self._tried:
                self._tried = True
                self._start()
            self._say(f"+ {group}:{marker}\n")

    def release(self, group: int, marker: str) -> None:
        """Stop watching a command that has ended."""
        with self._change:
            self._say(f"- {group}:{marker}\n")

    def pids(self) -> "List[int]":
        """Return the pid of the shell, if it was started."""
        return [self._shell.pid] if self._shell is not None else []

    def _start(self) -> None:
        argv = [b"/bin/sh", b"-c", f"T={MARKER}={self._token} {WATCH}".encode()]
        reading, writing = os.pipe()
        self._orders = FileIO(writing, "wb")
        try:
            with open(os.devnull, "wb", buffering=0) as nothing:
                self._shell = start(argv, os.environb, nothing.fileno(), nothing.fileno(), reading)
        except OSError:
            # There is no shell: see the class.
            self._orders.close()
        finally:
            os.close(reading)

    def _say(self, line: str) -> None:
        if self._shell is not None and self._orders is not None:
            try:
                self._orders.write(line.encode())
            except OSError:
                # The shell was ended from outside.
                return
