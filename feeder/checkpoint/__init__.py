"""Positions and arrays that survive: stored whole or not at all, and found again."""
