"""Choosing replay samples by their gradients: solvers, coordination between clients, policies."""
