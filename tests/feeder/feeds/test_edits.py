"""Edits of a run: what goes on, what a position says of it, and what is refused."""

from __future__ import annotations

import json
import logging
import re
from contextlib import ExitStack
from itertools import islice, zip_longest
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import feeder
from feeder import sources
from feeder.cli import main
from feeder.errors import ConfigError, ResumeError
from feeder.feeds.records import asked_of, when
from feeder.state.snapshot import Snapshot
from served import one_thread, reading, serving

FIRSTS = {"web": 0, "code": 10_000, "books": 20_000}


def corpus(name: str, size: int = 60, *, excluded: Any = (), seed: int | None = 1) -> Any:
    source = sources.arrays(np.arange(size) + FIRSTS[name])
    return (source.exclude(excluded) if excluded else source).shuffle(seed)


def mixed(mode: str = "drop", schedule: Any = (), **weights: Any) -> Any:
    given = {
        name: weight if isinstance(weight, tuple) else (corpus(name), weight)
        for name, weight in weights.items()
    }
    return sources.mix(given, schedule, mode)  # type: ignore[arg-type]


def feed(source: Any, resume: Any = None, batch_size: int = 4, **settings: Any) -> Any:
    return feeder.init_data_input_workers(
        ["x"], source, batch_size, coordinator=feeder.Coordinator(), resume=resume, **settings
    )


def read(source: Any, num: int | None, resume: Any = None, **settings: Any) -> tuple[Any, Any]:
    """The rows of some batches, and the position after them."""
    with feed(source, resume, **settings) as coordinator:
        rows = [batch["x"].tolist() for batch in islice(coordinator["train"], num)]
        return rows, coordinator.snapshot()


def every(rows: Any) -> list[int]:
    return [row for batch in rows for row in batch]


def test_the_error_names_the_cure_and_with_it_each_record_comes_once() -> None:
    before, state = read(mixed(web=7, code=3), 5)
    with pytest.raises(ResumeError, match=r"blocks.*; to go on .* give edit='why'$"):
        feed(mixed(web=1, code=1), state)
    after, _ = read(mixed(web=1, code=1), None, state, edit="more code")
    assert sorted(every(before + after)) == sorted([*range(60), *range(10_000, 10_060)])
    # One block of each two records.
    shares = [sum(row >= 10_000 for row in batch) for batch in after[:10]]
    assert shares == [2] * 10


@pytest.mark.parametrize("change", [{"last_batch": "drop"}, {"version": "2"}])
def test_what_no_edit_can_change_is_refused_by_name_and_without_the_cure(change: Any) -> None:
    _, state = read(mixed(web=1), 2)
    (field,) = change
    with pytest.raises(ResumeError, match=field) as caught:
        feed(mixed(web=1), state, **change)
    assert "edit=" not in str(caught.value)
    with pytest.raises(ResumeError, match=f"cannot change these: {field}.*It can change weights"):
        feed(mixed(web=1), state, edit="no", **change)


@pytest.mark.parametrize(
    ("mode", "weights"),
    [
        ("drop", (4, 1, 4)), ("drop", (1, 2, 4)), ("stop", (1, 2, 4)), ("repeat", (1, 2, 4)),
        ("drop", (0.123456, 0.3, 0.4)), ("repeat", (0.123456, 0.3, 0.4)),
    ],
)  # fmt: skip
def test_in_another_order_the_sources_are_the_same_mixture(
    mode: Any, weights: Any, caplog: Any
) -> None:
    by_name = dict(zip(FIRSTS, weights, strict=True))
    in_reverse = dict(reversed(by_name.items()))
    every_row, _ = read(mixed(mode, **by_name), 30, batch_size=1, epochs=2)
    before, state = read(mixed(mode, **by_name), 4, batch_size=1, epochs=2)
    caplog.clear()
    after, _ = read(
        mixed(mode, **in_reverse), 26, state, batch_size=1, epochs=2, edit="by the alphabet"
    )
    assert before + after == every_row
    assert caplog.messages == [
        "feed 'train' is edited at step 4 (by the alphabet): nothing changes"
    ]


@pytest.mark.parametrize("kind", ["state dict", "snapshot", "packed"])
def test_in_another_order_sources_of_equal_weights_are_no_resume(kind: str) -> None:
    """No field tells it, and records are drawn by it: some would be lost, and as many doubled."""

    def made(*names: str) -> Any:
        mixture = mixed(**dict.fromkeys(names, 1))
        return mixture.map(np.atleast_1d) if kind == "packed" else mixture

    def begun(source: Any, **settings: Any) -> Any:
        if kind != "packed":
            return feed(source, **settings)
        columns = ["tokens", "segment_ids", "positions", "loss_mask"]
        return feeder.init_data_input_workers(
            columns, sources.pack(source, 5, 2), 2, coordinator=feeder.Coordinator(), **settings
        )

    with begun(made("web", "code", "books")) as coordinator:
        wanted = [batch.columns[0].tolist() for batch in coordinator["train"]]
    with begun(made("web", "code", "books")) as coordinator:
        came = [next(coordinator["train"]).columns[0].tolist() for _ in range(4)]
        state = coordinator.state_dict() if kind == "state dict" else coordinator.snapshot()
    other = made("web", "books", "code")
    told = r"names: \['web', 'code', 'books'\] then, \['web', 'books', 'code'\] now; .* edit='why'"
    with pytest.raises(ResumeError, match=told):
        begun(other, resume=state)
    for source in (other, made("books", "code", "web"), other):
        with begun(source, resume=state, edit="by size") as coordinator:
            came.append(next(coordinator["train"]).columns[0].tolist())
            state = coordinator.snapshot()
    with begun(other, resume=state) as coordinator:
        came += [batch.columns[0].tolist() for batch in coordinator["train"]]
    assert came == wanted


def test_another_schedule_is_told_as_one(caplog: Any) -> None:
    _, state = read(mixed(schedule=[(10, {"web": 1, "code": 1})], web=7, code=3), 1)
    other = mixed(schedule=[(20, {"web": 1, "code": 1})], web=7, code=3)
    caplog.clear()
    read(other, 1, state, edit="later")
    assert "another schedule" in caplog.text


def test_another_mode_is_refused() -> None:
    _, state = read(mixed(web=1), 2)
    with pytest.raises(ResumeError, match=r"source.on_exhausted: 'drop' then, 'stop' now"):
        feed(mixed("stop", web=1), state, edit="no")


def test_a_position_after_an_edit_goes_on_without_one() -> None:
    _, state = read(mixed(web=7, code=3), 5)
    whole, _ = read(mixed(web=1, code=1), 12, state, edit="more code")
    some, after = read(mixed(web=1, code=1), 3, state, edit="more code")
    for edit in (None, "more code"):
        # The same note of what is so already is no second edit.
        rest, later = read(mixed(web=1, code=1), 9, after, edit=edit)
        assert some + rest == whole
        assert len(later.states[0].fingerprint["source.history"][2]) == 1
    noted, later = read(mixed(web=1, code=1), 9, after, edit="a note")
    assert some + noted == whole
    assert [one[4] for one in later.states[0].fingerprint["source.history"][2]] == [
        "more code", "a note",
    ]  # fmt: skip


def test_a_source_that_is_back_and_done_with_its_pass_waits_for_the_next_epoch() -> None:
    before, state = read(mixed(web=1, code=1), 6, epochs=3)
    _, state = read(mixed(web=1), 12, state, epochs=3, edit="out, to the end of the epoch")
    back, state = read(mixed(web=1, code=3), 20, state, epochs=3, edit="in, for what was left")
    last, _ = read(mixed(web=1, code=1), 7, state, epochs=3, edit="other weights")
    told = [sum(row >= 10_000 for row in every(rows)) for rows in (before, back, last)]
    assert told == [12, 48, 0]
    assert len({row for row in every(before + back) if row >= 10_000}) == 60


def test_all_comes_again_from_the_start() -> None:
    one, state = read(mixed(web=1, code=1), 6)
    two, state = read(mixed(web=1, books=2), 6, state, edit="books for code")
    grown = (corpus("web", 70, excluded=[range(5, 9)]), 1)
    three, state = read(mixed(web=grown, books=2), 9, state, edit="more web")
    now = {"web": grown, "books": 2}
    again, _ = read(mixed(**now, code=0), 21, state.at_start())
    assert again == one + two + three
    # Without what was taken out the batches that had it cannot come again, and others can.
    with feed(mixed(**now), state.at_start()) as coordinator, pytest.raises(feeder.FeedError) as no:
        next(coordinator["train"])
    assert "'code' has been taken out" in f"{no.value} {no.value.__cause__}"
    later, _ = read(mixed(**now), 9, state)
    with feed(mixed(**now, code=0), state) as coordinator:
        told = coordinator["train"].records(2)
    assert [FIRSTS[record.source.split("/")[0]] + record.number for (record,) in told] == one[2]
    assert later


@pytest.mark.parametrize("mode", ["drop", "repeat"])
def test_a_schedule_may_change_and_counts_from_the_epochs_start(mode: str) -> None:
    _, state = read(mixed(mode, web=1, code=1), 5)
    changed = mixed(mode, [(40, {"web": 1})], web=1, code=1)
    rows, _ = read(changed, 10, state, edit="web alone from record 40")
    assert [sum(row >= 10_000 for row in batch) for batch in rows] == [2] * 5 + [0] * 5


def test_a_run_of_one_source_grows_and_loses_records(caplog: Any) -> None:
    before, state = read(corpus("web"), 5)
    came = every(before)[7]
    coming = next(row for row in range(60) if row not in every(before))
    with caplog.at_level(logging.WARNING, "feeder"):
        after, _ = read(corpus("web", 80, excluded=[came, coming]), None, state, edit="mended")
    assert sorted(every(before + after)) == [row for row in range(80) if row != coming]
    assert "20 more" in caplog.text
    assert "1 of the 2 records that are excluded have come already, at steps [1]" in caplog.text


def test_the_size_of_a_batch_changes_and_not_the_order() -> None:
    before, state = read(corpus("web"), 5)
    after, later = read(corpus("web"), None, state, batch_size=7, edit="larger")
    whole, _ = read(corpus("web"), None)
    assert every(before + after) == every(whole)
    assert {len(batch) for batch in after[:-1]} == {7}
    with pytest.raises(ResumeError, match="before step 5, from which on batches have another size"):
        feed(corpus("web"), later.at_start(), batch_size=7)


REFUSED = {
    "smaller": (lambda: corpus("web", 50), "has 50 records, and had 60"),
    "another order": (lambda: corpus("web", seed=2), "another than it was.*seed: 1 then, 2 now"),
    "not by chance": (lambda: mixed(web=1), "source: 'arrays' then, 'mix' now"),
    "a composition": (lambda: corpus("web").take(60), "another than it was|cannot change"),
}


@pytest.mark.parametrize(("now", "why"), REFUSED.values(), ids=REFUSED.keys())
def test_what_is_no_longer_the_source_is_refused(now: Any, why: str) -> None:
    _, state = read(corpus("web"), 3)
    with pytest.raises(ResumeError, match=why):
        feed(now(), state, edit="no")


def test_an_exclusion_is_not_taken_back() -> None:
    _, state = read(corpus("web", excluded=[3]), 3)
    with pytest.raises(ResumeError, match=r"had the records \[\(3, 4\)\] excluded"):
        feed(corpus("web"), state, edit="no")


def test_files_have_to_grow_at_their_end(tmp_path: Path) -> None:
    def lines(*names: str) -> Any:
        for name in names:
            text = "".join(f'{{"x": {hash(name) % 1000 + i}}}\n' for i in range(20))
            (tmp_path / f"{name}.jsonl").write_text(text)
        paths = [tmp_path / f"{name}.jsonl" for name in names]
        return sources.jsonl(paths, index=tmp_path).shuffle(seed=1)

    _, state = read(lines("b", "c"), 3)
    with pytest.raises(ResumeError, match="has grown, but not at its end"):
        feed(lines("a", "b", "c"), state, edit="no")
    rows, _ = read(lines("b", "c", "d"), None, state, edit="one more")
    assert len(every(rows)) == 60 - 12


CANNOT = {
    "function": (lambda call: [np.arange(4)], {}, "a fetch function of your own"),
    "mixture that is filtered": (
        sources.mix({"web": corpus("web").filter(bool)}), {}, "packed or filtered sources",
    ),
    "carry": (corpus("web"), {"last_batch": "carry"}, "last_batch='carry'"),
    "dali": (
        sources.arrays(np.arange(30), order="dali", random_shuffle=True), {}, "order='dali'",
    ),
    "shards": (corpus("web").shard(0, 2), {}, "shards"),
    "mixture that is shuffled": (
        sources.mix({"web": corpus("web")}, random_shuffle=True), {}, "shuffled or sharded itself",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("source", "settings", "why"), CANNOT.values(), ids=CANNOT.keys())
def test_runs_that_cannot_be_edited_say_why(source: Any, settings: Any, why: str) -> None:
    with feed(source, epochs=None, **settings) as coordinator:
        next(coordinator["train"])
        state = coordinator.snapshot()
    with pytest.raises(ConfigError, match=why):
        feed(source, state, edit="no", epochs=None, **settings)


def test_a_bare_token_is_not_edited() -> None:
    with feed(mixed(web=1)) as coordinator:
        token = next(coordinator["train"]).cut.token()
    with pytest.raises(ResumeError, match="a token does not say what the run was made of"):
        feed(mixed(web=1, code=1), token, edit="no")


def test_a_run_that_has_ended_is_not_edited() -> None:
    _, state = read(mixed(web=1), None)
    with pytest.raises(ResumeError, match="has ended"):
        feed(mixed(web=1, code=1), state, edit="no")
    rows, _ = read(mixed(web=1, code=1), None, state, edit="one more epoch", epochs=2)
    assert len(every(rows)) == 120


def test_the_log_tells_the_history(tmp_path: Path, capsys: Any) -> None:
    _, state = read(mixed(web=7, code=3), 5)
    _, state = read(mixed(web=1, code=1), 3, state, edit="more code")
    path = tmp_path / "run.snapshot"
    state.write(path)
    assert main(["log", str(path)]) == 0
    assert capsys.readouterr().out.splitlines()[3:6] == [
        "    code: weight 3, 60 records; 6 read",
        "  edit at step 5: more code",
        "  steps 5 to 7, 4 rows a call, seed 0",
    ]
    assert main(["log", "--json", str(path)]) == 0
    first, second = json.loads(capsys.readouterr().out)["train[0]"]
    assert (first["note"], first["sources"]["web"]["read"]) == (None, 14)
    assert (second["from_step"], second["to_step"]) == (5, 8)
    assert second["sources"]["code"] == {
        "weight": 1, "records": 60, "excluded": 0, "excluded_ranges": [], "read": 6
    }  # fmt: skip


@pytest.mark.served  # for its CPU
@pytest.mark.parametrize("mode", ["drop", "stop", "repeat"])
def test_twenty_edits_of_six_sources_by_uneven_weights_are_a_small_position(mode: Any) -> None:
    def source(number: int) -> Any:
        return sources.mix(
            {f"source {i}": (sources.arrays(np.arange(10**5)).shuffle(seed=1),
                             0.1234567 * (i + 1) + 0.001 * number) for i in range(6)},
            on_exhausted=mode,
        )  # fmt: skip

    state = None
    for number in range(21):
        edit = f"edit number {number}" if number else None
        _, state = read(source(number), 3, state, edit=edit, epochs=None)
    assert len(bytes(state)) <= 5000
    # What came before is not mixed again to go on, nor to say how far the run is.
    with feed(source(20), state, epochs=None) as coordinator:
        coordinator["train"].stats()
        run = coordinator["train"]._streams[0].config.stream.fetch.run
        made = [n for n, chapter in enumerate(run.route.chapters) if "rest" in vars(chapter)]
        assert made in ([], [20])


def test_records_that_are_excluded_by_and_by_are_told_once() -> None:
    """Also of a source that was taken out, and is back."""
    numbers = [*range(0, 1000, 4)]

    def source(num: int, *, back: bool = True) -> Any:
        web = corpus("web", 1500, excluded=numbers[:num] if num else ())
        return sources.mix({"web": (web, int(back)), "code": (corpus("code", 1500), 1)})

    rows, state = read(source(0), 3)
    rows = every(rows)
    for edit, num, back in (
        ("many", 150, True), ("one more", 151, True), ("out", 151, False), ("back", 151, True),
        ("100 more", 250, True),
    ):  # fmt: skip
        more, state = read(source(num, back=back), 3, state, edit=edit)
        rows += every(more)
    # The ranges of now stand beside it: before there were none, one less, as many, and 99 less.
    assert str(state.states[0].fingerprint["source.history"]).count("], [") < 130
    start = Snapshot.from_bytes(bytes(state)).at_start()
    assert every(read(source(250), 18, start)[0]) == rows
    more, _ = read(source(250), None, state)
    web = [row for row in rows + every(more) if row < 10_000]
    assert len(web) == len(set(web))
    came = {row for row in rows if row < 10_000}
    assert set(web) == {n for n in range(1500) if n not in set(numbers)} | came


def test_a_snapshot_of_a_function_has_no_start() -> None:
    replay = lambda worker_id, batch_size: [np.zeros(3)]  # noqa: E731
    with feeder.init_data_input_workers(["x"], replay, 3, coordinator=feeder.Coordinator()) as c:
        next(c["train"])
        with pytest.raises(ResumeError, match="begin it without a position"):
            Snapshot(c.snapshot().states).at_start()


def test_the_only_source_of_a_run_comes_on() -> None:
    settings = {"epochs": 6}
    source = sources.mix({"web": corpus("web", 8)})
    first, state = read(source, 3, **settings)
    with feed(source, state, edit="a note", **settings) as coordinator:
        seen = [(one.step, one.row) for one in coordinator["train"].when("web", 5)]
        rows = first + [batch["x"].tolist() for batch in coordinator["train"]]
    found = [(step, of.index(5)) for step, of in enumerate(rows) if 5 in of]
    assert seen == found
    assert len(found) == 6


def test_a_source_that_was_taken_out_says_since_when_its_records_come_no_more() -> None:
    before, state = read(mixed(web=1, code=1), 3)
    came = [row - 10_000 for row in every(before) if row >= 10_000]
    new = next(number for number in range(60) if number not in came)
    with feed(mixed(web=1, code=0), state, edit="out") as coordinator:
        train = coordinator["train"]
        for number in came:
            (seen,) = train.when("code", number)
            assert before[seen.step][seen.row] == 10_000 + number
        with pytest.raises(ConfigError, match="'code' was taken out by the edit at step 3"):
            next(train.when("code", new))
        next(train)
        alone = asked_of(coordinator.snapshot().states[0])[0]
    # A position does not hold the order of what was taken out.
    for number in (came[0], new):
        with pytest.raises(ConfigError, match=r"out by the edit at step 3, .* known with it alone"):
            next(when(alone, "code", number))
    with pytest.raises(ConfigError, match="source 'code' has 60 records"):
        when(alone, "code", 60)


def rounds(make: Any, num: int, position: Any, rounds: int = 3) -> tuple[dict[int, Any], Any]:
    """Some rounds of a served feed of so many queues, by step, and the state of its first
    consumer, which is of the middle of the last round."""
    rows, states = {}, []
    with serving(make, queues=num) as server, ExitStack() as stack:
        consumers = [
            stack.enter_context(reading(server, queue=i, resume=position)) for i in range(num)
        ]
        for _ in range(rounds):
            for consumer in consumers:
                batch = next(consumer)
                rows[batch.step] = batch["x"].tolist()
                told = [one.number + FIRSTS[one.source] for (one,) in batch.records()]
                assert told == rows[batch.step]
        states = [consumer.state_dict() for consumer in consumers]
    return rows, states[0]


@pytest.mark.served
def test_servers_edit_with_any_number_of_queues_and_refuse_another_place() -> None:
    def served(edit: str | None = None, **weights: Any) -> Any:
        return lambda: feed(mixed("repeat", **weights), edit=edit, epochs=None)

    with one_thread():
        first, before = rounds(served(web=7, code=3), 3, None)
        second, after = rounds(served("more code", web=1, code=1), 2, before)
        third, _ = rounds(served(web=1, code=1), 4, after)
        rows = first | second | third
        with (
            serving(served(web=1, code=1), queues=2) as server,
            reading(server, queue=0, resume=after),
            pytest.raises(ResumeError, match="start all trainers from one checkpoint"),
        ):
            feeder.connect(server.address, queue=1, resume=before)
    assert sorted(rows) == list(range(9 + 6 + 12))
    start = Snapshot.from_bytes(after["feeder"]).at_start()
    whole, _ = read(mixed("repeat", web=1, code=1), len(rows), start, epochs=None)
    assert whole == [rows[step] for step in range(len(rows))]


@pytest.mark.parametrize("last_batch", ["keep", "drop"])
def test_lengths_and_skips_are_those_of_the_edited_run(last_batch: str) -> None:
    settings: dict[str, Any] = {"epochs": 3, "last_batch": last_batch}
    before, state = read(mixed(web=7, code=3), 7, **settings)
    edited: dict[str, Any] = {**settings, "batch_size": 7, "edit": "more code"}
    rows, _ = read(mixed(web=1, code=1), None, state, **edited)
    with feed(mixed(web=1, code=1), state, **edited) as coordinator:
        assert len(coordinator["train"]) == len(before + rows)
    skipped, _ = read(mixed(web=1, code=1), None, state, skip=20, **edited)
    assert skipped == rows[20:]


def test_a_source_comes_back_with_the_files_that_it_had(tmp_path: Path) -> None:
    def lines(*names: str) -> Any:
        for number, name in enumerate(names):
            text = "".join(f'{{"x": {100 * number + i}}}\n' for i in range(20))
            (tmp_path / f"{name}.jsonl").write_text(text)
        return sources.jsonl([tmp_path / f"{name}.jsonl" for name in names], index=tmp_path)

    def with_files(*names: str) -> Any:
        return sources.mix({"web": (lines("a"), 1), "code": (lines("a", *names), 1)})

    _, state = read(with_files("b"), 3)
    _, state = read(sources.mix({"web": (lines("a"), 1)}), 1, state, edit="out")
    for names, why in {("c",): "another than", ("b", "c"): "put back with other files"}.items():
        with pytest.raises(ResumeError, match=f"the source 'code' .*{why}"):
            feed(with_files(*names), state, edit="in")
    rows, _ = read(with_files("b"), None, state, edit="in")
    assert len(every(rows)) == 60 - 16


def test_two_edits_may_lie_at_one_place() -> None:
    before, state = read(mixed(web=1, code=1), 5)
    for weights, edit in (({"web": 1}, "out"), ({"web": 2, "code": 1, "books": 1}, "in")):
        with feed(mixed(**weights), state, edit=edit) as coordinator:
            state = coordinator.snapshot()
    after, later = read(mixed(web=2, code=1, books=1), 20, state)
    assert len(set(every(before + after))) == 25 * 4
    again, _ = read(mixed(web=2, code=1, books=1), 25, later.at_start())
    assert again == before + after


def test_a_position_before_an_edit_of_its_history_is_not_edited() -> None:
    _, state = read(mixed(web=1, code=1), 5)
    _, state = read(mixed(web=2, code=1), 2, state, edit="more web")
    with pytest.raises(ResumeError, match="at step 0, before an edit at step 5 of its own history"):
        feed(mixed(web=1, code=1), state.at_start(), edit="no")


def test_a_history_without_sense_is_refused_by_name() -> None:
    _, state = read(mixed(web=1, code=1), 2)
    _, state = read(mixed(web=1, code=2), 2, state, edit="more code")
    (one,) = state.states
    number, names, (edit,) = one.fingerprint["source.history"]
    wrong: list[Any] = [
        5,
        [],
        [number, names, 7],
        [number, [], [edit]],
        [number, names, [edit[:4]]],
    ]
    for i in range(8):
        wrong += [[number, names, [[*edit[:i], value, *edit[i + 1 :]]]] for value in ("x", [1])]
    for history in [[2, names, [edit]], *wrong]:
        fingerprint = {**one.fingerprint, "source.history": history}
        for more in ({}, {"edit": "again"}):
            try:
                feed(
                    mixed(web=1, code=2), Snapshot((one._replace(fingerprint=fingerprint),)), **more
                )
            except feeder.FeedError:
                continue
            # A note may be any text.
            assert history[2][0][4] in ("x", [1]) or history[2][0] == edit


def test_a_source_that_is_made_of_others_and_has_grown_is_refused_by_its_size() -> None:
    def joined(size: int) -> Any:
        return corpus("web", size).concat(corpus("code"))

    _, state = read(joined(60), 5)
    with pytest.raises(ResumeError, match=r"an edit cannot change: .*size: .*; give it another"):
        feed(joined(70), state, edit="more web")


EDITS: dict[str, tuple[list[str], Any, dict[str, Any]]] = {
    "weights": (["--weight", "web=0.25", "--weight", "code=0.75"], {"web": 1, "code": 3}, {}),
    "uneven": (["--weight", "code=1", "--weight", "web=.3"], {"web": 0.3, "code": 1}, {}),
    "out": (["--weight", "web=1", "--weight", "code=0"], {"web": 1}, {}),
    "size": (["--batch-size", "7"], {"web": 7, "code": 3}, {"batch_size": 7}),
    "seed": (["--seed", "9"], {"web": 7, "code": 3}, {"seed": 9}),
    "note": ([], {"web": 7, "code": 3}, {}),
}


@pytest.mark.parametrize(
    ("flags", "settings"),
    [(["--seed", "9"], {"seed": 9}), (["--batch-size", "7"], {"batch_size": 7})],
)
def test_a_file_of_one_source_is_edited_too(flags: Any, settings: Any, tmp_path: Path) -> None:
    old, new = tmp_path / "old", tmp_path / "new"
    _, state = read(corpus("web", seed=None), 6, epochs=2)
    state.write(old)
    assert main(["edit", str(old), "--output", str(new), "--why", "it", *flags]) == 0
    told, _ = read(corpus("web", seed=None), None, new, epochs=2, **settings)
    wanted, _ = read(corpus("web", seed=None), None, state, edit="it", epochs=2, **settings)
    assert told == wanted
    assert main(["log", str(new)]) == 0


def test_weights_may_lie_as_far_apart_as_those_of_a_mixture(tmp_path: Path) -> None:
    """Beyond the whole numbers that a position holds."""
    old, new = tmp_path / "old", tmp_path / "new"
    before, state = read(mixed(web=7, code=3), 6)
    state.write(old)
    far = mixed(web=1e-30, code=1)
    wanted, after = read(far, 3, state, edit="it")
    assert {row // 10_000 for row in every(wanted)} == {1}
    assert read(far, 3, Snapshot.from_bytes(bytes(after)).at_start(), batch_size=4)[0] == before[:3]
    flags = ["--weight", "web=1e-30", "--weight", "code=1"]
    assert main(["edit", str(old), "--output", str(new), "--why", "it", *flags]) == 0
    assert read(far, 3, new)[0] == wanted
    with feed(mixed(web=7, code=3)) as coordinator:
        train = coordinator["train"]
        came = [next(train)["x"].tolist() for _ in range(6)]
        assert train.edit(far, why="it") == 6
        assert came + [next(train)["x"].tolist() for _ in range(3)] == before + wanted


@pytest.mark.parametrize("mode", ["drop", "stop", "repeat"])
@pytest.mark.parametrize(("flags", "weights", "settings"), EDITS.values(), ids=EDITS.keys())
def test_a_file_is_edited_as_a_resume_would(
    flags: list[str], weights: Any, settings: Any, mode: str, tmp_path: Path
) -> None:
    old, new = tmp_path / "old", tmp_path / "new"
    _, state = read(mixed(mode, web=7, code=3), 6, epochs=2)
    _, state = read(mixed(mode, web=7, code=3), 5, state, edit="before", epochs=2)
    state.write(old)
    assert main(["edit", str(old), "--output", str(new), "--why", "it", *flags]) == 0
    settings = {**settings, "epochs": 2}
    told, _ = read(mixed(mode, **weights), None, new, **settings)
    wanted, _ = read(mixed(mode, **weights), None, state, edit="it", **settings)
    assert told == wanted
    with feed(mixed(mode, **weights), new, **settings) as coordinator:
        found = coordinator.snapshot().states[0]
    with feed(mixed(mode, **weights), state, edit="it", **settings) as coordinator:
        assert found == coordinator.snapshot().states[0]
    # The file that was read is as it was, and none is written over.
    assert old.read_bytes() == bytes(state)
    assert main(["edit", str(old), "--output", str(new), "--why", "it"]) == 2
    if settings.keys() == {"epochs"} and flags:
        with pytest.raises(ResumeError, match=r"source.* then, .* now"):
            feed(mixed(mode, web=7, code=3), new, epochs=2)


NOT_IN_A_FILE: dict[str, tuple[Any, dict[str, Any], list[str], str]] = {
    "no mixture": (corpus("web"), {}, ["--weight", "web=1"], "is no mixture"),
    "some weights": (mixed(web=1, code=1), {}, ["--weight", "web=1"], "give one for each"),
    "none": (mixed(web=1), {}, ["--weight", "web=0"], "every weight of feed 'train' is 0"),
    "twice": (
        mixed(web=1), {}, ["--weight", "web=1", "--weight", "web=2"], "names a source twice",
    ),
    "too large": (corpus("web"), {}, ["--batch-size", str(2**64)], "more than 64 bits"),
    "the other size": (corpus("web"), {}, ["--global-batch-size", "8"], "but batch_size 4"),
    "schedule": (
        mixed("drop", [(40, {"web": 1})], web=1, code=1), {}, ["--seed", "3"], "has a schedule",
    ),
    "carry": (corpus("web"), {"last_batch": "carry"}, [], "last_batch='carry'"),
    "filter": (corpus("web").filter(bool), {}, [], "rows that are not one for each record"),
    "function": (lambda call: [np.arange(4)], {}, [], "a fetch function of your own"),
}  # fmt: skip


@pytest.mark.parametrize(
    ("source", "settings", "flags", "why"), NOT_IN_A_FILE.values(), ids=NOT_IN_A_FILE.keys()
)
def test_what_cannot_be_edited_in_a_file_is_refused_by_name(
    source: Any, settings: Any, flags: list[str], why: str, tmp_path: Path, capsys: Any
) -> None:
    with feed(source, epochs=None, **settings) as coordinator:
        next(coordinator["train"])
        coordinator.checkpoint(tmp_path / "old")
    new = tmp_path / "new"
    assert main(["edit", str(tmp_path / "old"), "--output", str(new), "--why", "no", *flags]) == 2
    assert not new.exists()
    told = capsys.readouterr().err
    assert re.search(why, told), told


def by_epoch(source: Any, resume: Any, devices: int, **settings: Any) -> tuple[Any, list[Any]]:
    """The rows of each epoch, and after each round how many rows have come, and the position."""
    epochs: dict[int, list[int]] = {}
    places = []
    with feed(source, resume, 3, devices=devices, epochs=4, **settings) as coordinator:
        train = coordinator["train"]
        for batches in zip_longest(*(train.on(i) for i in range(devices))):
            for batch in filter(None, batches):
                epochs.setdefault(batch.epoch, []).extend(batch["x"].tolist())
            places.append((len(every(epochs.values())), coordinator.snapshot()))
    return epochs, places


def without(name: str, size: int, *excluded: int) -> Any:
    return corpus(name, size, excluded=excluded, seed=None)


# Of a source that is put back at an epoch's start too little is left for a block, or what is left
# is excluded: sources from there on, by what is left.
EMPTY_EPOCHS: dict[str, Any] = {
    "stop": lambda left: {"web": (without("web", 8), 1), "code": (without("code", 7), 4)},
    "drop": lambda left: {"code": (without("code", 7, *left), 1)},
    "repeat": lambda left: {"code": (without("code", 7, *left), 1)},
}


@pytest.mark.parametrize("devices", [1, 2])
@pytest.mark.parametrize("mode", EMPTY_EPOCHS)
def test_an_epoch_that_has_nothing_left_is_passed_over(mode: str, devices: int) -> None:
    web, code, at = without("web", 8), without("code", 7), 2 // devices - 1
    came, places = by_epoch(mixed(mode, web=(web, 1), code=(code, 2)), None, devices)
    left = {*range(10_000, 10_007)} - {*came[0][:6]}
    # Without `code` epoch 0 ends with two more batches.
    _, places = by_epoch(mixed(mode, web=(web, 1)), places[at][1], devices, edit="out")
    now = EMPTY_EPOCHS[mode]([record - 10_000 for record in left])
    epochs, later = by_epoch(mixed(mode, **now), places[at][1], devices, edit="in")
    size = 5 if mode == "stop" else 4
    assert {epoch: len({*rows}) for epoch, rows in epochs.items()} == {2: size, 3: size}
    rows = every(epochs.values())
    assert len(rows) == 2 * size
    for num, state in later:
        rest, _ = by_epoch(mixed(mode, **now), state, devices)
        assert every(rest.values()) == rows[num:]


def state_dict(source: Any, num: int, **settings: Any) -> tuple[list[int], Any]:
    """The rows of some batches, of which nobody holds the last one, and the state after them."""
    with feed(source, **settings) as coordinator:
        rows = [batch["x"].tolist() for batch in islice(coordinator["train"], num)]
        return every(rows), coordinator.state_dict()


@pytest.mark.parametrize("num", range(8))
@pytest.mark.parametrize("seed", [None, 1])
@pytest.mark.parametrize("batch_size", [4, 7])
def test_a_source_that_has_grown_in_front_is_refused_if_a_record_of_it_has_come(
    num: int, seed: int | None, batch_size: int
) -> None:
    def grown(*more: int) -> Any:
        source = sources.arrays(np.array([*more, *range(20)]))
        return source if seed is None else source.shuffle(seed)

    settings: dict[str, Any] = {"batch_size": batch_size, "epochs": 4}
    _, state = state_dict(grown(), num, **settings)
    if num == 0:
        # Each record is still to come.
        rows, _ = read(grown(-1, -2, -3), None, state, edit="in front", **settings)
        assert sorted(every(rows)) == sorted([-1, -2, -3, *range(20)] * 4)
        return
    with pytest.raises(ResumeError, match="other rows than before"):
        read(grown(-1, -2, -3), None, state, edit="in front", **settings)


@pytest.mark.parametrize("num", range(1, 11))
def test_a_source_of_a_mixture_that_has_grown_is_compared_or_named(num: int, caplog: Any) -> None:
    def mixture(*more: int) -> Any:
        rare = sources.arrays(np.array([*more, *range(10_000, 10_020)]))
        return mixed(web=(corpus("web"), 11), code=(rare, 1))

    rows, state = state_dict(mixture(), num)
    told = "whether 'code' has grown at its end is not compared"
    if any(row >= 10_000 for row in rows[-4:]):
        with pytest.raises(ResumeError, match="other rows than before"):
            read(mixture(-1), 1, state, edit="in front")
        assert told not in caplog.text
        # A snapshot has the rows that are left over, so that no call is made again.
        _, state = read(mixture(), num)
    read(mixture(-1), 1, state, edit="in front")
    assert (told in caplog.text) == any(row >= 10_000 for row in rows)


def test_what_came_before_an_epoch_that_was_passed_over_is_compared_with_nothing_else() -> None:
    web, code = without("web", 8), without("code", 7)
    settings: dict[str, Any] = {"batch_size": 3, "epochs": 4}
    _, state = state_dict(mixed("stop", web=(web, 1), code=(code, 2)), 2, **settings)
    alone = mixed("stop", web=(web, 1))
    _, state = state_dict(alone, 2, resume=state, edit="out", **settings)
    now = mixed("stop", web=(web, 1), code=(code, 4))
    wanted = None
    for edit in ("in", "a note", "another"):
        with feed(now, state, 3, epochs=4, edit=edit) as coordinator:
            state = coordinator.state_dict()
            rows = [batch["x"].tolist() for batch in coordinator["train"]]
        assert rows == (wanted or rows)
        wanted = rows
    assert [len(batch) for batch in rows] == [3, 2, 3, 2]
