"""A file for each loader, used as its own documents say. `exactness.loader` says what is in one."""
