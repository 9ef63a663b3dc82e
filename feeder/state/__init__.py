"""Positions as bytes, and what they mean."""
