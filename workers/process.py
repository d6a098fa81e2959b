"""Hosts a worker in a process of its own, without Ray: `python -m workers.process`.

The first line of stdin is a WorkerSpec as JSON. The parent keeps the pipe open; when it closes, however the parent
ended, the process exits, so that no worker outlives its engine.
"""

import logging
import os
import sys
import threading

import msgspec

from workers.worker import Worker, WorkerSpec


def _exit_with_parent() -> None:
    sys.stdin.buffer.read()
    os._exit(0)


def main() -> None:
    """Runs the worker; exits with 1 when it fails (the driver has been told why)."""
    logging.basicConfig(level=os.environ.get("SHOAL_LOG_LEVEL", "WARNING").upper(), format="%(name)s: %(message)s")
    spec = msgspec.json.decode(sys.stdin.buffer.readline(), type=WorkerSpec)
    threading.Thread(target=_exit_with_parent, daemon=True).start()
    try:
        Worker().run(spec)
    except Exception:
        os._exit(1)
    os._exit(0)  # no teardown of torch and its threads: nothing is left to save


if __name__ == "__main__":
    main()
