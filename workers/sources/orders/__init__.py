"""Orders: which record comes when."""
