"""The server: it makes the batches of feeds and sends them to consumers in other processes."""
