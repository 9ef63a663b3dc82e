"""The service: feeds for other processes, over sockets and shared memory. Start at README.md."""
