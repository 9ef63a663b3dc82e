"""Adapters: feeds in the trainers and frameworks that people use. Each is imported by its name."""
