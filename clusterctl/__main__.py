"""`python -m clusterctl`."""

from clusterctl.quick import main

main()
