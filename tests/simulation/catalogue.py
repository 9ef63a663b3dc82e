"""Bugs that the service once had, or was built to exclude, to be planted again: one of a class."""

from __future__ import annotations

from planted.bug import Bug

_MEMBERSHIP = "feeder/service/protocol/membership.py"
_GROUP = "feeder/service/server/group.py"
_RUN = "feeder/service/server/run.py"
_DELIVERY = "feeder/service/server/delivery.py"
_SESSION = "feeder/service/client/session.py"
_LOOP = "feeder/service/client/io_loop.py"
_ARENA = "feeder/service/memory/arena.py"


def _bug(name: str, harm: str, file: str, symbol: str, old: str, new: str) -> Bug:
    return Bug(name=name, harm=harm, file=file, symbol=symbol, old=old, new=new, tests=())


MEMBERSHIP = (
    _bug(
        "two holders",
        "A newcomer is given a queue whose consumer is alive.",
        _MEMBERSHIP,
        "Membership._ask",
        "if old.lives and not (event.takes_over or is_same):",
        "if False:",
    ),
    _bug(
        "an older question wins",
        "A question of a former connection arrives last, and the queue goes to nobody.",
        _MEMBERSHIP,
        "Membership._ask",
        "if is_same and old.attempt > event.attempt:",
        "if False:",
    ),
    _bug(
        "who goes on is not noticed",
        "A trainer that was taken for hung goes on, and the others wait for it for ever.",
        _MEMBERSHIP,
        "Membership._use",
        "done = self._look_again(now) if is_news else []",
        "done: list[Any] = []",
    ),
    _bug(
        "who is lost is not noticed",
        "A trainer dies before it can take batches, and the others wait for it for ever.",
        _MEMBERSHIP,
        "Membership._lose",
        "return [one, *self._look_again(now)]",
        "return [one]",
    ),
    _bug(
        "undecided for ever",
        "A trainer that came without a position and uses batches counts as undecided.",
        _MEMBERSHIP,
        "Membership._use",
        "member.undecided, is_news = False, True",
        "is_news = True",
    ),
    _bug(
        "waits for one that had all",
        "Who has had everything and said goodbye is waited for.",
        _MEMBERSHIP,
        "Membership._leave",
        "move = Move.ENDS if self.members[event.seat].has_all else Move.LEAVES",
        "move = Move.LEAVES",
    ),
    _bug(
        "an end is forgotten",
        "A trainer that came and left without a batch makes the others wait for a queue that had "
        "ended.",
        _MEMBERSHIP,
        "Membership._ask",
        "had_ended=old.had_ended or old.state is State.ENDED or (old.has_lease and old.has_all),",
        "had_ended=False,",
    ),
    _bug(
        "cut off before the goodbye",
        "Who had had everything, asks once more after its connection broke, and is gone, is waited "
        "for.",
        _MEMBERSHIP,
        "Membership._ask",
        "had_ended=old.had_ended or old.state is State.ENDED or (old.has_lease and old.has_all),",
        "had_ended=old.had_ended or old.state is State.ENDED,",
    ),
    _bug(
        "silent after everything",
        "Who has had everything and was taken for hung is waited for.",
        _MEMBERSHIP,
        "Member.has_ended",
        "is_over = self.had_ended or self.has_all",
        "is_over = self.had_ended",
    ),
    _bug(
        "nobody is gone without",
        "All wait for a trainer that had had everything and left while no server was there.",
        _MEMBERSHIP,
        "Membership._tick",
        "if now >= self._goes_on_at:",
        "if False:",
    ),
    _bug(
        "left out while it starts",
        "Who starts is not waited for: the others begin without it, at other weights.",
        _MEMBERSHIP,
        "Membership._begin",
        "may_lack = ready and missing and all(member.rejoins for member in here)",
        "may_lack = ready and missing",
    ),
    _bug(
        "never told that others are gone on",
        "A trainer that starts anew without a position, while the others go on, stops all.",
        _MEMBERSHIP,
        "Membership._refusal",
        "return error if has_used or now >= since + self.lease_s else None",
        "return None",
    ),
    _bug(
        "waits for one that has not asked",
        "A trainer that comes back waits until one that the feed has run with asks for a batch.",
        _MEMBERSHIP,
        "Membership.missing",
        "max([self.counting.round(one.step) for one in some], default=-math.inf)",
        "max([self.counting.round(one.step) for one in decided], default=-math.inf)",
    ),
    _bug(
        "what is pending counts as used",
        "A server ends while a trainer that came back has batches left to use.",
        _MEMBERSHIP,
        "Member.is_settled",
        "return bool(self.ending) and self.used == self.sent and not self.pending",
        "return bool(self.ending) and self.used == self.sent",
    ),
)

POSITIONS = (
    _bug(
        "begins at the newest",
        "A run begins at the newest position: those behind it lose rows.",
        _MEMBERSHIP,
        "Membership._begin",
        "stands = sorted(steps, key=lambda seat: steps[seat])",
        "stands = sorted(steps, key=lambda seat: -steps[seat])",
    ),
    _bug(
        "what was sent is forgotten",
        "Where a run begins again, a queue goes on where its consumer came from.",
        _MEMBERSHIP,
        "Membership.note_sent",
        "        member.sent_to = place\n",
        "",
    ),
    _bug(
        "what was sent is stored",
        "The stored position is ahead of a slow trainer: what dies with it is lost.",
        _MEMBERSHIP,
        "Membership._begin",
        "used = {member.seat: self._used_step(member)",
        "used = {member.seat: self._sent_step(member)",
    ),
    _bug(
        "who comes back has used all before",
        "The stored position counts batches that still wait in a consumer that came back.",
        _MEMBERSHIP,
        "Membership._used_step",
        "return 0 if member.rejoins or member.start is None",
        "return 0 if member.start is None",
    ),
    _bug(
        "any position is one of the stream",
        "A trainer with the checkpoint of another run is served.",
        "feeder/service/server/position_check.py",
        "PositionCheck._is_same",
        "return key(one, self._stream) == key(other, self._stream)",
        "return True",
    ),
    _bug(
        "comes back where the server began",
        "Who comes back without a position begins where the server was resumed, and not at the "
        "start of its queue.",
        _RUN,
        "FeedFactory.find",
        "found_at = None if rejoins else self.origin",
        "found_at = self.origin",
    ),
    _bug(
        "a position before the first batch moves",
        "After a failover the position before the first batch is ahead.",
        _SESSION,
        "ClientSession._take_lease",
        "start = inbox.start or RemotePosition(lease.identity, opened.token).state(lease.columns)",
        "start = RemotePosition(lease.identity, opened.token).state(lease.columns)",
    ),
    _bug(
        "a load keeps what has come",
        "A state is loaded, and the stream goes on after what had been received before.",
        _SESSION,
        "ClientSession.restart",
        "self._last, self._token, self._has_position = None, token, True",
        "self._token, self._has_position = token, True",
    ),
)

FAILOVER = (
    _bug(
        "whoever deals",
        "A server comes back with another number of queues, and most batches are handed to nobody.",
        _SESSION,
        "ClientSession._check_dealing",
        "if found and not self.has_ended:",
        "if False:",
    ),
    _bug(
        "asks for what it came with",
        "After a failover a consumer asks for what it has received once more.",
        _SESSION,
        "ClientSession._send_open",
        "token=self._token if self._last is None else self._last.token",
        "token=self._token",
    ),
    _bug(
        "starts once more",
        "A consumer that has run comes to the next server as one that starts: it is refused, or "
        "waits for all.",
        _SESSION,
        "ClientSession.prepare_rejoin",
        "self.rejoins |= bool(self._has_run or self.has_ended or self._ended)",
        "pass",
    ),
    _bug(
        "a start that is late fails",
        "A consumer that was given the queue asks again, is refused since the others went on, and "
        "its user gets the error.",
        _SESSION,
        "ClientSession.rejoins_after",
        "if not is_late or self._num_opens >= say.MAX_OPENS:",
        "if True:",
    ),
    _bug(
        "messages of a lease that is over",
        "What an older lease still brings is taken for the new one's.",
        _SESSION,
        "ClientSession._is_stale",
        "return bool(generation != self._generation)",
        "return False",
    ),
    _bug(
        "waits for each other at two servers",
        "Trainers at two living servers of one feed wait for each other for ever.",
        _LOOP,
        "ClientLoop._leave_where_others_lack",
        "self._move_on_at = now + self._failover.patience_s(lease.opened.lease_s)",
        "self._move_on_at = math.inf",
    ),
    _bug(
        "a snapshot nobody answers",
        "A question for a snapshot waits when the connection ends.",
        _LOOP,
        "ClientLoop._close_connection",
        '        self._session.refuse_requests("the connection has ended")\n',
        "",
    ),
    _bug(
        "no memory, again and again",
        "A consumer that cannot map shared memory comes back for ever, and stops the others.",
        _LOOP,
        "ClientLoop._receive",
        "elif not self._session.do_without_shared(str(error)):",
        "else:",
    ),
    _bug(
        "the end overtakes what was dropped",
        "A server that is closed near the end sends the end before the last batches.",
        _RUN,
        "Outbox.ending",
        "return None if self._batches or self._closed else self._ending",
        "return None if self._batches else self._ending",
    ),
    _bug(
        "the base of a lease",
        "Batches of the lease before are reported as used under the new one.",
        _SESSION,
        "ClientSession._take_lease",
        "inbox.received, self._send, inbox.report",
        "inbox.handed, self._send, inbox.report",
    ),
)

SLOTS = (
    _bug(
        "a slot is free while it is looked at",
        "A batch that the user still holds is written over.",
        "feeder/service/memory/mapping.py",
        "MappedArena.lend",
        "lease = SlotLease(root, self._released.append)",
        "lease = SlotLease(root[:], self._released.append)",
    ),
    _bug(
        "the arena of one that is gone",
        "An arena whose reader died is kept: the slots that it had are never free again.",
        _ARENA,
        "ArenaSlots.retire",
        "if any(slot.sent or not keep(slot.arena) for slot in slots):",
        "if any(not keep(slot.arena) for slot in slots):",
    ),
    _bug(
        "slots of frames are kept",
        "Batches that went as frames keep their slots, and the feed stands still.",
        _DELIVERY,
        "Delivery.let_go",
        "if not lease.shared and batches:",
        "if False:",
    ),
    _bug(
        "discarded batches keep slots",
        "A batch that nobody wants any more keeps its slot, and the feed stands still.",
        _RUN,
        "ServedFeed._make",
        "            self.slots.free(queue, slot_of(batch))\n",
        "",
    ),
    _bug(
        "what was made and not sent keeps slots",
        "Batches of a run that was stopped keep their slots.",
        _ARENA,
        "Pool.reopen",
        "self.free[number][:] = [slot for slot in reversed(slots) if not slot.sent]",
        "pass",
    ),
    _bug(
        "the batcher is not woken",
        "Slots come back and whoever makes batches is not told.",
        _ARENA,
        "ArenaSlots.wake",
        "if device is not None and (hungry or self._pools[device].has_plenty):",
        "if device is not None and self._pools[device].has_plenty and hungry:",
    ),
    _bug(
        "sent is not noted",
        "A slot that is on its way counts as free where the feed begins again.",
        _DELIVERY,
        "Delivery._send_batches",
        "            slot.sent |= bit\n",
        "            pass\n",
    ),
)

DEALING = (
    _bug(
        "one replica lets go for all",
        "A slot of a shared queue is free when the first of its replicas gives it back.",
        _ARENA,
        "Pool.let_go",
        "slots = [slot for slot in slots if not slot.left]",
        "pass",
    ),
    _bug(
        "leaves out twice",
        "A consumer that skips rounds and has received nothing skips them again after a failover.",
        _SESSION,
        "ClientSession._take_lease",
        "self._token, self._skip = opened.token, 0",
        "self._token = opened.token",
    ),
    _bug(
        "a round is not rounded up",
        "With another number of queues the rest of a round is dealt once more.",
        "feeder/workers/stream/rounds.py",
        "begin",
        "rest = 0 if then is None else then.rest(epoch, step)",
        "rest = 0",
    ),
    _bug(
        "counts rounds from the start",
        "Batches are dealt as if the number of queues had always been this one.",
        _MEMBERSHIP,
        "Membership._counting_at",
        "return self.counting._replace(begins=0 if into is None else number - into)",
        "return self.counting",
    ),
)

EPOCHS = (
    _bug(
        "an epoch begins no round",
        "A server deals batches out through all epochs, whatever the feed says.",
        "feeder/workers/stream/rounds.py",
        "Counting.number",
        "if self.per_epoch:",
        "if False:",
    ),
    _bug(
        "positions tell of the first epoch",
        "A position of a later epoch says that its rounds began where those of the first did.",
        "feeder/service/client/remote.py",
        "Identity.dealing",
        'if self.fingerprint.get("rounds") == "epoch" and group.epoch != self.began.epoch:',
        "if False:",
    ),
)
"""These are planted where rounds are of an epoch."""

CHECKPOINTS = (
    _bug(
        "a file is not synced",
        "A checkpoint that was said to be there is torn after a loss of power.",
        "feeder/durable.py",
        "write",
        "            fs.fsync(file)\n",
        "",
    ),
    _bug(
        "a name is not synced",
        "A checkpoint that was said to be there is gone after a loss of power.",
        "feeder/durable.py",
        "write",
        "        fs.fsync(folder)\n",
        "",
    ),
    _bug(
        "what is damaged is taken",
        "A position that the disk has damaged is given to a trainer.",
        "feeder/checkpoint/format.py",
        "read_entry",
        'if xxhash.xxh3_128_digest(raw.data if placed.size else b"") != placed.digest:',
        "if False:",
    ),
    _bug(
        "no older one is looked for",
        "Where the newest checkpoint is damaged a trainer has none.",
        "feeder/checkpoint/store.py",
        "CheckpointStore.find",
        "for name in reversed(names):",
        "for name in names[-1:]:",
    ),
    _bug(
        "one is enough",
        "All checkpoints but the newest are removed, and that may be damaged.",
        "feeder/checkpoint/store.py",
        "CheckpointStore._retire",
        "for name in found[:-keep]:",
        "for name in found:",
    ),
)

BUGS = MEMBERSHIP + POSITIONS + FAILOVER + SLOTS + DEALING + EPOCHS + CHECKPOINTS
