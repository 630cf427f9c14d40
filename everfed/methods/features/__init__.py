"""Methods on features: closed forms on frozen ones, prototypes, and heads re-trained on virtual ones."""
