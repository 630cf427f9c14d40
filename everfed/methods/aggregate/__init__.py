"""How the clients' models become the shared one."""
