"""The node process that holds snapshots in shared memory and makes them durable; no torch."""
