"""The wire protocol as rules: messages, sessions, membership and checksums, without sockets or clock."""
