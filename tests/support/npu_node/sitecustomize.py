"""Makes this node look as if it had NPUs: found by the interpreter itself where this folder is on PYTHONPATH."""

import glob

_there = glob.glob


def _with_devices(pattern, *more, **how):
    made_up = ["/dev/davinci0", "/dev/davinci1"]
    return made_up if str(pattern).startswith("/dev/davinci") else _there(pattern, *more, **how)


glob.glob = _with_devices
