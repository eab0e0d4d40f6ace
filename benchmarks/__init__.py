"""Measurements of relight against other engines, in one run on one machine; `python -m benchmarks --help`."""
