"""Bugs in what is counted, judged and shown."""

from __future__ import annotations

from planted.bug import Bug

_STATS = "tests/workers/test_stats.py::"
_MONITOR = "tests/feeder/service/client/test_monitor.py::"
_PORT = "tests/feeder/observe/status/test_port.py::"
_VERDICT = "tests/feeder/observe/test_verdict.py::test_verdict"

SHOWING = (
    Bug(
        name="groups counted whole",
        harm="A trainer that has been given a group of batches is shown as if it had used them "
        "all: throughput comes in bursts, and a stalled trainer is seen too late.",
        file="workers/stats.py",
        symbol="Handed.counts",
        old="            batches - left, rows",
        new="            batches, rows",
        tests=(_STATS + "test_each_batch_that_is_handed_out_counts_at_once",),
    ),
    Bug(
        name="waits counted at their end",
        harm="A trainer that waits for ever is shown as one that never waits, and the alarm for "
        "starving trainers stays silent when it matters most.",
        file="workers/stats.py",
        symbol="Stopwatch.seconds",
        old="            seconds += max(0.0, now - since)",
        new="            seconds += 0.0",
        tests=(_STATS + "test_a_wait_under_way_is_counted",),
    ),
    Bug(
        name="calls counted at their end",
        harm="A fetch function that hangs is shown as idle.",
        file="workers/stats.py",
        symbol="FetchStats.counts_of",
        old="        running_s = max(0.0, now - began)",
        new="        running_s = 0.0",
        tests=(_STATS + "test_a_wait_under_way_is_counted",),
    ),
    Bug(
        name="waits for room not counted",
        harm="A feed that is held up by its trainer is said to be busy copying.",
        file="workers/fetch/channel.py",
        symbol="Channel._wait_for_room",
        old="        room.start(now)",
        new="        pass",
        tests=(_STATS + "test_a_feed_that_waits_for_its_trainer_says_so",),
    ),
    Bug(
        name="news told twice",
        harm="Each second that a trainer waited is told to the server with every message after it.",
        file="feeder/service/client/stats.py",
        symbol="ConsumerStats.take_report",
        old="        told, self._told = self._told, seen",
        new="        told = self._told",
        tests=("tests/feeder/service/server/test_accounts.py::test_a_consumer_tells_what_is_new",),
    ),
    Bug(
        name="a counter that falls",
        harm="Prometheus takes a counter that falls for a restart, and adds all of it once more.",
        file="feeder/service/server/stats.py",
        symbol="QueueStats.wait_s",
        old="max(self._shown_s, self._waited_s + waits_s)",
        new="self._waited_s + waits_s",
        tests=(
            "tests/feeder/service/server/test_accounts.py::test_a_consumer_that_has_nothing_left_waits",
        ),
    ),
    Bug(
        name="counts begin again",
        harm="Each time that a feed is begun again its counters are back at 0.",
        file="feeder/service/server/run.py",
        symbol="ServedFeed._make",
        old="resume=resume, stats=self.counted",
        new="resume=resume",
        tests=(_MONITOR + "test_counts_go_on_when_the_feed_is_begun_again",),
    ),
    Bug(
        name="monitors with seats",
        harm="Who was let in to look may take a trainer's queue.",
        file="feeder/service/server/io_loop.py",
        symbol="ServerLoop._greet",
        old="        if isinstance(message, say.Open) and not self.monitors.knows(peer):",
        new="        if isinstance(message, say.Open):",
        tests=(_MONITOR + "test_a_monitor_that_wants_more_is_refused",),
    ),
    Bug(
        name="any wire is the network",
        harm="A trainer beside its server is told to look at the network.",
        file="feeder/observe/verdict.py",
        symbol="_transport",
        old='    if consumer is None or consumer.plane != "frames":',
        new="    if consumer is None:",
        tests=(_VERDICT + "[batches in shared memory are on their way]",),
    ),
    Bug(
        name="the slowest worker is slow",
        harm="Of equal workers the one that is slower by a hair is blamed.",
        file="feeder/observe/verdict.py",
        symbol="_SLOWER",
        old="_SLOWER = 3.0",
        new="_SLOWER = 0.9",
        tests=(_VERDICT + "[two workers, much alike]",),
    ),
    Bug(
        name="labels twice",
        harm="The streams of one feed overwrite each other's metrics.",
        file="feeder/observe/prometheus.py",
        symbol="samples",
        old="else old + value",
        new="else value",
        tests=("tests/feeder/observe/test_prometheus.py::test_streams_of_one_feed_are_added_up",),
    ),
    Bug(
        name="stacks for everybody",
        harm="Other hosts are shown the stacks of all threads, source lines and all.",
        file="feeder/observe/status/routes.py",
        symbol="answer",
        old='    if path == "/debug/threads" and not (is_near(peer) and names_this_host):',
        new="    if False:",
        tests=(_PORT + "test_stacks_are_for_this_host_alone",),
    ),
    Bug(
        name="a port that waits for its clients",
        harm="A server does not end while somebody has the page half asked for.",
        file="feeder/observe/status/port.py",
        symbol="StatusPort.close",
        old="        self._open.hang_up()\n",
        new="",
        tests=(_PORT + "test_it_closes_at_once_with_slow_clients_in_the_middle",),
    ),
)
"""All of them."""
