"""The program of a rank after the first, started by `workers.RankProcess`; no command for people."""

from __future__ import annotations

import os
import signal
import sys
from multiprocessing.connection import Connection

from onbeat.output import unblocked_output


def main(file_descriptor: int) -> None:
    """Serve the steps of one rank until the first one closes the connection."""
    # A service manager signals every process; the first rank decides when the others end. Set before torch is
    # imported, which takes seconds.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    with unblocked_output():
        from onbeat.engine.parallel.rank import run_rank

        with Connection(file_descriptor) as connection:
            run_rank(connection)
    # There is nothing to save, and to take torch apart would take longer than all the rest of the end.
    os._exit(0)


if __name__ == "__main__":
    main(int(sys.argv[1]))
