"""`python -m clusterctl`, and the function that pip's script `clusterctl` calls.

The first line of code handles Ctrl-C: Python would end with a traceback while it imports the rest.
"""

import gc

from clusterctl import interrupts

interrupts.while_loading()
# Modules create no garbage: with Python's threshold of 700, collections take a tenth of a short command.
gc.set_threshold(50_000)

from clusterctl.cli.main import main  # noqa: E402

if __name__ == "__main__":
    main()
