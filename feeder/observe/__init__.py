"""Figures of feeds, the verdict on what holds them up, and the ways to show both."""
