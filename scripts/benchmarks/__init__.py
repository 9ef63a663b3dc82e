"""What feeder costs: loads as data, measured by one harness. `scripts/bench` runs them."""
