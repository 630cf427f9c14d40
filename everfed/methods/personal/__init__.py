"""Models that differ from client to client."""
