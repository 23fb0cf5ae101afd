"""`python -m clusterctl`."""

from clusterctl.cli.door import main

main()
