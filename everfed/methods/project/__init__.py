"""Rules on gradients and updates: projection, orthogonal directions, matching."""
