"""The server of a feed."""
