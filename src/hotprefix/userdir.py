"""The user's own cache folder. Owns: where it is, and whether what lies in it may be executed.

Rule: it imports no module of hotprefix and few others, because it is used before anything is loaded.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path


def default_cache_dir() -> Path:
    """The platform's per-user cache folder for hotprefix."""
    if sys.platform == "darwin":
        base = Path.home() / "Library" / "Caches"
    elif sys.platform == "win32":
        base = Path(os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local")
    else:
        base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return base / "hotprefix"


def private(directory: Path) -> bool:
    """Whether the folder exists and only this user can write to it, so that code found in it is the user's
    own."""
    try:
        found = directory.stat()
    except OSError:
        return False
    if sys.platform == "win32":
        return True
    return found.st_uid == os.getuid() and not found.st_mode & 0o022
