"""The leaderboard: every method on the same streams, with the same number of tries for its own weight and the learning
rate. `tuning` says what is tried, `records` keeps what was measured, `page` draws it."""
