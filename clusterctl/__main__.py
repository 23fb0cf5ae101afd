"""`python -m clusterctl`, and the function that pip's script `clusterctl` calls.

The first line of code handles Ctrl-C: Python would end with a traceback while it imports the rest.
"""

from clusterctl import interrupts

interrupts.while_loading()

from clusterctl.cli.main import main  # noqa: E402

if __name__ == "__main__":
    main()
