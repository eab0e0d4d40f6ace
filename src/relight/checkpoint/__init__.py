"""The training side: train state, snapshot, restore; the only package that needs torch."""
