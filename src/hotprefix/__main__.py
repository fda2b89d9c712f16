"""The entry point, also of `python -m hotprefix`. Owns: `main`.

Rule: nothing is imported before `main` runs, because every process that hotprefix starts (a run of a sweep,
the engine) imports the main module again and has no use for a command line.
"""

from __future__ import annotations


def main() -> None:
    """Run the command line."""
    from hotprefix.cli import main as command_line

    command_line()


if __name__ == "__main__":
    main()
