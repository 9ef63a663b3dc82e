"""Where batches are written, and where they wait for the user."""
