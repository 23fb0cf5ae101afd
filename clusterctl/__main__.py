"""`python -m clusterctl`."""

# The C module, which is loaded already.
import _signal as signal  # type: ignore[import-not-found]

before = signal.getsignal(signal.SIGINT)
# Ctrl-C while modules load ends the process without a traceback.
if callable(before):
    signal.signal(signal.SIGINT, signal.SIG_DFL)

from clusterctl.cli.entry import main  # noqa: E402

signal.signal(signal.SIGINT, before)
main()
