"""Helpers that parts of several families use."""
