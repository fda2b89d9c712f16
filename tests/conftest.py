"""Tests run the sources as they are, not a compiled copy of them; HOTPREFIX_INTERPRETED=0 tests the copy."""

from __future__ import annotations

import os

os.environ.setdefault("HOTPREFIX_INTERPRETED", "1")
