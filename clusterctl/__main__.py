"""`python -m clusterctl`."""

# The C half, which is there already.
import _signal as signal  # type: ignore[import-not-found]

before = signal.getsignal(signal.SIGINT)
# A Ctrl-C while modules load ends it without a traceback.
if callable(before):
    signal.signal(signal.SIGINT, signal.SIG_DFL)

from clusterctl.cli.entry import main  # noqa: E402

signal.signal(signal.SIGINT, before)
main()
