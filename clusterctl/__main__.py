"""`python -m clusterctl`."""

import _signal as signal  # type: ignore[import-not-found]  # the C half, which is there already

before = signal.getsignal(signal.SIGINT)
if callable(before):  # a Ctrl-C while modules load ends it without a traceback
    signal.signal(signal.SIGINT, signal.SIG_DFL)

from clusterctl.cli.entry import main  # noqa: E402

signal.signal(signal.SIGINT, before)
main()
