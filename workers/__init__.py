"""The kernel of feeder: everything that happens before rows have become a batch.

Fetcher threads call the user's fetch function (`fetcher`, `calls`), hand chunks over in bundles
under a bound (`channel`, `rota`, `ledger`), one thread merges them in ticket order (`merge`), cuts
them into batches (`assembler`) and deals these out to device queues (`enqueuer`). `pipeline` wires
it together. Nothing in here imports `feeder`.
"""
