"""The replay buffer of a client, what decides its contents, and the parts that replay from it."""
