"""Penalties and distillation that keep a model near what it knew."""
