"""What feeds have done, in numbers, and what holds them up, in words."""
