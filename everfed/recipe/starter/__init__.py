"""The files that `everfed init` writes."""
