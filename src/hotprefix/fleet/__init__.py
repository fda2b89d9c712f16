"""Which worker serves a request, and why. Start with `fleet.py`, the edge; docs/fleet.md has the rules."""
