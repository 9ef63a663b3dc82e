"""Which call runs, and on which thread."""
