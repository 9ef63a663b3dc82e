"""The configuration of a service: settings from a TOML file, the environment and flags.

The keys are the keyword arguments of `feeder.init_data_input_workers` and `feeder.serve`, read
from their signatures. A fetch function is named as MODULE:ATTR, by the file of this host alone.
"""
