"""The same questions for every loader: what is lost, repeated, moved, hung or leaked, see
`scripts/bench exactness --help`."""
