"""The wire protocol as rules: messages, sessions, membership, checksums; no socket, no clock."""
