"""The `relight` command: a face on what stores, checks and keeps checkpoints. Never imports torch.

Modules here import little at their top: `relight --help` must answer at once. Exit codes are in `exits`.
"""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["main"]


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command line (default: the process's own) and return its exit code."""
    from relight.cli.app import run

    return run(argv)
