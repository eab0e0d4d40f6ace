"""The verbs by name, where each lives, and the overview; what a typing error or `--help` needs, and nothing more."""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Callable, Sequence

from relight.cli.exits import EXIT_CODES
from relight.errors import ConfigError

__all__ = ["VERBS", "choose_verb", "load_verb", "overview"]

VERBS: dict[str, tuple[str, str]] = {
    "ls": ("listing:ls", "List the committed checkpoints of a run, newest first."),
    "show": ("listing:show", "Show what one checkpoint holds."),
    "verify": ("checking:verify", "Read every byte of the checkpoints and compare it with its digest."),
    "diff": ("checking:diff", "Compare two checkpoints: every tensor, and the rest of the state."),
    "export": ("converting:export", "Write a checkpoint's tensors in another format."),
    "import": ("converting:import_", "Make a run with one checkpoint out of another format."),
    "prune": ("keeping:prune", "Remove checkpoints that need not be kept."),
    "pin": ("keeping:pin", "Keep a checkpoint whatever the retention rules say."),
    "unpin": ("keeping:unpin", "Let the retention rules remove a checkpoint again."),
    "save": ("keepers:save", "Ask a running training for a checkpoint at its next step."),
    "keeper status": ("keepers:status", "Show the keepers: who holds snapshots in this machine's memory."),
    "keeper stop": ("keepers:stop", "Stop the keeper of a run."),
    "keeper clean": ("keepers:clean", "Free the shared memory of runs whose keeper is gone."),
}
"""Verb -> where its function is (module of this package, name), and the first line of that function's docstring."""


def choose_verb(words: Sequence[str]) -> tuple[str, list[str]]:
    """Return the verb that a command line begins with, and the words after it.

    Raises:
        ConfigError: it begins with none; the message offers the nearest one.
    """
    for num_words in (2, 1):
        verb = " ".join(words[:num_words])
        if verb in VERBS and len(words) >= num_words:
            return verb, list(words[num_words:])
    given = " ".join(words[: 2 if words[0] == "keeper" else 1])
    nearest = difflib.get_close_matches(given, VERBS, n=1) or [
        name for name in VERBS if name.startswith(f"{given} ")
    ]
    hint = f"did you mean `relight {nearest[0]}`? " if nearest else ""
    raise ConfigError(f"there is no verb {given!r}; {hint}`relight --help` lists all")


def load_verb(verb: str) -> Callable[..., int]:
    """Return the function of a verb."""
    module, _, name = VERBS[verb][0].partition(":")
    function: Callable[..., int] = getattr(importlib.import_module(f"relight.cli.{module}"), name)
    return function


def overview() -> str:
    """Return what `relight --help` prints."""
    width = max(map(len, VERBS))
    lines = [f"  {verb:<{width}}  {summary}" for verb, (_, summary) in VERBS.items()]
    return "\n".join(
        [
            "Usage: relight VERB URL ...",
            "",
            "Look at, check and keep the checkpoints of training runs.",
            "URL is the root that was given to relight.Checkpointer: a path or file:///path.",
            "",
            *lines,
            "",
            "`relight VERB --help` explains one; `relight --version` prints the version.",
            EXIT_CODES,
        ]
    )
