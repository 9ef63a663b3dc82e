"""Rows become one order, exact batches and positions."""
