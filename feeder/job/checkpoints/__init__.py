"""Checkpoints of a job's nodes, committed together."""
