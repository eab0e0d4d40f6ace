"""What a checkpoint is made of, how it comes to exist and how it is found again; no torch."""
