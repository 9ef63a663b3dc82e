"""The trainer's end of a served feed."""
