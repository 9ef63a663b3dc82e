"""Batches in memory that processes share."""
