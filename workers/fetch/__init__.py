"""Which call runs, and on which thread (see README.md)."""
