"""The engine of feeder: everything that happens before rows have become a batch.

Fetcher threads call the user's fetch function and hand chunks over under a bound (`fetch`). One
thread at a time merges them into one order, cuts them into batches and routes these to the device
queues (`stream`). `sources` are fetch functions that are already written; `pipeline` wires a stream
together. Nothing in here imports the rest of `feeder`.
"""
