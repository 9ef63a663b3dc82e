"""Objects of stores: how they are read, kept on this host, and asked for before they are needed."""
