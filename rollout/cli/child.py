"""The `rollout` command as a child of the process that needs it: it ends with that one, even where that is killed."""

from __future__ import annotations

import os
import signal
import threading
import time

from rollout.cli.main import main


def _end_with(parent: int) -> None:
    """Send this process SIGTERM when its parent is gone."""

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(1)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=watch, name="parent watch", daemon=True).start()


if __name__ == "__main__":
    _end_with(os.getppid())
    main()
