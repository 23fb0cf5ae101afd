"""`python -m clusterctl`."""

from clusterctl import interrupts

interrupts.while_loading()

from clusterctl.cli.entry import main  # noqa: E402

main()
