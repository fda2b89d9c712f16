"""The main module of a child: `python -m hotprefix.fleet_child FOLDER COMMAND...`. Owns: how a child
notices that its parent is gone, also if that was killed.

Rules:
1. The parent holds the other end of the child's standard input and writes nothing. When it closes, the parent
   is gone: the child removes the fleet's folder and ends its process group, which is its own.
2. Nothing is imported before `main` runs, because the engine's process imports the main module again.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
import threading


def main() -> None:
    """Run the command."""
    folder = sys.argv.pop(1)
    threading.Thread(target=_until_the_parent_is_gone, args=(folder,), name="parent", daemon=True).start()
    from hotprefix.__main__ import main as command_line

    command_line()


def _until_the_parent_is_gone(folder: str) -> None:
    while os.read(0, 4096):
        pass
    shutil.rmtree(folder, ignore_errors=True)
    os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":
    main()
