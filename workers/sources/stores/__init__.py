"""Stores: where records lie, and how they are read."""
