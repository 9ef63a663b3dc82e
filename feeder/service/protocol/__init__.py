"""What server and consumer say to each other, without sockets, threads or a clock."""
