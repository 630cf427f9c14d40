"""Replay without stored samples: generators, synthesis on the server, flows, prototypes."""
