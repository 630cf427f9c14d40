"""What test files share: a toy stream, a bench that runs any method on it, and an engine of bytes."""
