"""How long tests wait before they call it a hang: no test fails because a machine does ten other things."""

HANG = 900.0  # seconds; below `timeout` in pyproject.toml, so that what a test itself says about it comes first
