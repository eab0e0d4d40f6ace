"""Checkpoints in other formats, read and written without torch; nothing that they hold is ever executed."""
