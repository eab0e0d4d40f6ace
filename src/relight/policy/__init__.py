"""Decisions as pure functions: facts in, values or (decision, reason) out; no clock, no I/O, no logging."""
