"""What an operator looks at: a page, metrics, and whether all is well, at one port."""
