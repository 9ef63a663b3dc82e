"""Which tests belong to a module: the nearest first, since the first that fails ends a run."""

from __future__ import annotations

_PROTOCOL = ("tests/feeder/service/protocol", "tests/simulation/test_membership.py")
_SERVER = (
    "tests/feeder/service/server/test_accounts.py",
    "tests/feeder/service/server/test_dealing.py",
    "tests/feeder/service/server/test_other_runs.py",
)
_SERVED = (
    "tests/feeder/service/client/test_undecided.py",
    "tests/feeder/service/client/test_away.py",
    "tests/simulation/test_simulation.py",
)
_STREAM = ("tests/property/test_programs.py", "tests/conformance/test_stream.py")
_ORDERS = (
    "tests/workers/sources/orders",
    "tests/workers/sources/test_source.py",
    "tests/workers/sources/test_steps.py",
)
_STATE = ("tests/feeder/state", "tests/conformance/test_golden_files.py")
_LOADERS = (
    "tests/feeder/adapters/test_loops.py",
    "tests/adapters/test_torch_loader.py",
    "tests/adapters/test_torch_states.py",
    "tests/adapters/test_torch_draws.py",
)

CORE = {
    "feeder/service/protocol/membership.py": (*_PROTOCOL, *_SERVER, *_SERVED),
    "feeder/service/protocol/member.py": (*_PROTOCOL, *_SERVER, *_SERVED),
    "feeder/service/protocol/session.py": (*_PROTOCOL, *_SERVER, *_SERVED),
    "feeder/service/server/delivery.py": (*_SERVER, *_SERVED),
    "feeder/service/client/machine.py": (
        "tests/feeder/service/client/test_machine.py",
        "tests/feeder/service/client/test_connecting.py",
        *_SERVED,
        "tests/feeder/service/client/test_lost_server.py",
        "tests/feeder/service/server/test_leases.py",
    ),
    "feeder/service/client/lease.py": (
        *_SERVED,
        "tests/feeder/service/client/test_lost_server.py",
        "tests/feeder/service/server/test_leases.py",
    ),
    "workers/stream/merge.py": ("tests/workers/stream/test_assembler.py", *_STREAM),
    "workers/stream/assembler.py": (
        "tests/workers/stream/test_assembler.py",
        "tests/workers/stream/test_placement.py",
        *_STREAM,
    ),
    "workers/stream/position.py": (
        "tests/workers/stream/test_position.py",
        "tests/workers/stream/test_assembler.py",
        *_STREAM,
    ),
    "workers/stream/rounds.py": (
        "tests/workers/stream/test_shares.py",
        "tests/workers/stream/test_assembler.py",
        *_SERVER,
        *_STREAM,
    ),
    "workers/fetch/resuming.py": ("tests/conformance/test_resume_checks.py", *_STREAM),
    "workers/sources/orders/orders.py": _ORDERS,
    "workers/sources/orders/permutation.py": _ORDERS,
    "workers/sources/orders/sharding.py": _ORDERS,
    "workers/sources/orders/shuffles.py": _ORDERS,
    "workers/sources/orders/windowed.py": _ORDERS,
    "workers/sources/orders/blocks.py": ("tests/workers/sources/test_mixture.py",),
    "workers/sources/steps/walked.py": ("tests/workers/sources/test_walked.py",),
    "workers/sources/mixture.py": ("tests/workers/sources/test_mixture.py",),
    "workers/sources/packing.py": ("tests/workers/sources/test_packing.py",),
    "feeder/state/token.py": _STATE,
    "feeder/state/snapshot.py": _STATE,
    "feeder/checkpoint/store.py": ("tests/feeder/checkpoint",),
    "feeder/executors/ledger.py": (
        "tests/executors/actors/test_ledger.py",
        "tests/executors/actors/test_pool.py",
        "tests/executors/test_pool.py",
    ),
}
ADAPTERS = {
    "feeder/adapters/loop.py": _LOADERS,
    "feeder/adapters/streams.py": _LOADERS,
    "feeder/adapters/datasets.py": _LOADERS,
}
