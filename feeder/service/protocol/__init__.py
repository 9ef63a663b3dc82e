"""The wire protocol as rules: messages, sessions, seats and checksums, without sockets or clock."""
