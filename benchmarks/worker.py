"""The process that measures one method: `python -m benchmarks.worker MEASUREMENT METHOD DIRECTORY OPTIONS RESULT`."""

from __future__ import annotations

import json
import logging
import os
import sys
import warnings
from pathlib import Path


def main() -> None:
    """Measure, and write the numbers as JSON to the file named last."""
    measurement, method, directory, options, result = sys.argv[1:]
    # Peers warn about their own use of deprecated names, and log each save.
    warnings.simplefilter("ignore")
    logging.disable(logging.INFO)
    from benchmarks.measure import MEASUREMENTS

    asked = json.loads(options)
    numbers = MEASUREMENTS[measurement](method, Path(directory), asked)
    Path(result).write_text(json.dumps(numbers), encoding="utf-8")
    if asked.get("crash"):
        # As if killed: nothing is told, nothing is closed.
        os._exit(0)


if __name__ == "__main__":
    main()
