"""Batches on GPUs: pinned slots, copies beside the trainer's work, slots on the device."""
