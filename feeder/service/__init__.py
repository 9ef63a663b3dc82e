"""Sockets, shared memory and addresses: the only place of feeder that talks to another process."""
