"""Sockets, addresses, keys, and who may connect."""
