"""Runs a command until whoever started this is gone, however it went; then ends all its processes.

The processes of a vLLM server outlive one that is killed. Run as a file, for any Python: what it
needs comes with Python.
"""

import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress

GRACE = 10.0
"""seconds for an orderly end"""


def main() -> int:
    """Run the words behind this file's name; standard input is what the starter holds."""
    server = subprocess.Popen(sys.argv[1:], stdin=subprocess.DEVNULL, start_new_session=True)

    def wait() -> None:
        # ends when nobody holds the other end; not sys.stdin, at whose lock Python aborts when this
        # process ends before
        while os.read(0, 1):
            pass
        end(server.pid, signal.SIGTERM)
        time.sleep(GRACE)
        end(server.pid, signal.SIGKILL)

    threading.Thread(target=wait, daemon=True).start()
    code = server.wait()
    end(server.pid, signal.SIGKILL)  # its children
    return code


def end(group: int, number: int) -> None:
    """Send a signal to a group of processes that may be gone."""
    with suppress(ProcessLookupError):
        os.killpg(group, number)


if __name__ == "__main__":
    sys.exit(main())
