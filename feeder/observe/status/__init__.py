"""The status port: a page, metrics, and probes for an operator."""
