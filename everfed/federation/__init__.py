"""A real federation: what is needed beyond simulation when clients are other people's machines."""
