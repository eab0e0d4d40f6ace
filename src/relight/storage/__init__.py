"""Places that hold bytes: one narrow protocol, one file per kind of backend."""
