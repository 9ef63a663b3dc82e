"""Feeds in this process."""
