"""Which tests belong to a module: the nearest first, since the first that fails ends a run."""

from __future__ import annotations

_PROTOCOL = ("tests/feeder/service/protocol", "tests/simulation/test_membership.py")
_SERVER = (
    "tests/feeder/service/server/test_accounts.py",
    "tests/feeder/service/server/test_dealing.py",
    "tests/feeder/service/server/test_edits.py",
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
    "tests/workers/sources/test_described.py",
)
_MIXED = (
    "tests/workers/sources/test_mixture.py",
    "tests/workers/sources/test_packing.py",
    "tests/workers/sources/test_described.py",
    "tests/property/test_asked.py",
)
_STATE = ("tests/feeder/state", "tests/conformance/test_golden_files.py")
_LOADERS = (
    "tests/feeder/adapters/test_loops.py",
    "tests/adapters/test_frozen_states.py",
    "tests/adapters/test_torch_loader.py",
    "tests/adapters/test_torch_states.py",
    "tests/adapters/test_torch_draws.py",
)

CORE = {
    "feeder/service/protocol/membership.py": (*_PROTOCOL, *_SERVER, *_SERVED),
    "feeder/service/protocol/member.py": (*_PROTOCOL, *_SERVER, *_SERVED),
    "feeder/service/protocol/session.py": (*_PROTOCOL, *_SERVER, *_SERVED),
    "feeder/service/server/delivery.py": (
        "tests/feeder/service/server/test_delivery.py",
        *_SERVER,
        "tests/feeder/service/server/test_failing.py",
        "tests/feeder/service/server/test_frames.py",
        "tests/conformance/test_served_errors.py",
        "tests/conformance/test_served_positions.py",
        *_SERVED,
    ),
    "feeder/service/client/machine.py": (
        "tests/feeder/service/client/test_machine.py",
        "tests/feeder/service/client/test_connecting.py",
        *_SERVED,
        "tests/feeder/service/client/test_lost_server.py",
        "tests/feeder/service/server/test_leases.py",
    ),
    "feeder/service/client/lease.py": (
        "tests/feeder/service/server/test_accounts.py",
        "tests/feeder/service/server/test_frames.py",
        "tests/feeder/service/memory/test_writable.py",
        *_SERVED,
        "tests/feeder/service/client/test_lost_server.py",
        "tests/feeder/service/server/test_leases.py",
    ),
    "workers/stream/merge.py": (
        "tests/workers/stream/test_assembler.py",
        "tests/workers/fetch/test_bad_input.py",
        "tests/feeder/feeds/test_rows_per_call.py",
        *_STREAM,
    ),
    "workers/stream/assembler.py": (
        "tests/workers/stream/test_assembler.py",
        "tests/workers/stream/test_placement.py",
        "tests/conformance/test_resume_checks.py",
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
        "tests/conformance/test_elastic.py",
        "tests/conformance/test_served_positions.py",
        *_STREAM,
    ),
    "workers/fetch/resuming.py": (
        "tests/conformance/test_resume_checks.py",
        "tests/conformance/test_resume_values.py",
        "tests/workers/fetch/test_bad_input.py",
        *_STREAM,
    ),
    "workers/sources/orders/orders.py": _ORDERS,
    "workers/sources/orders/permutation.py": _ORDERS,
    "workers/sources/orders/sharding.py": (*_ORDERS, *_MIXED),
    "workers/sources/orders/shuffles.py": _ORDERS,
    "workers/sources/orders/windowed.py": (
        *_ORDERS,
        "tests/conformance/test_source_cursors.py",
    ),
    "workers/sources/orders/blocks.py": (*_MIXED, "tests/freeze/test_freeze.py"),
    "workers/sources/steps/walked.py": ("tests/workers/sources/test_walked.py",),
    "workers/sources/mixture.py": (
        *_MIXED,
        "tests/workers/sources/test_walked.py",
        "tests/freeze/test_freeze.py",
    ),
    "workers/sources/packing.py": (
        "tests/workers/sources/test_packing.py",
        "tests/workers/sources/test_walked.py",
        "tests/feeder/feeds/test_packed_edits.py",
        "tests/property/test_asked.py",
    ),
    "feeder/state/token.py": (*_STATE, "tests/conformance/test_resume_values.py"),
    "feeder/state/snapshot.py": (
        *_STATE,
        "tests/fuzz/test_fuzz.py",
        "tests/workers/sources/test_mixture.py",
    ),
    "feeder/checkpoint/store.py": (
        "tests/feeder/checkpoint",
        "tests/crashes/test_io_errors.py",
        "tests/feeder/cli/test_checkpoint.py",
    ),
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
