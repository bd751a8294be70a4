"""Messages survive the wire exactly, and nothing malformed is ever decoded."""

from __future__ import annotations

import tracemalloc

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.groups import make_group
from workers.messages.arrays import Bool, Float32, Int32, Uint8
from workers.messages.codec import MAX_PIECE, SMALL, MessageError, buffers, encode, from_coordinator, from_workers, pack
from workers.messages.from_coordinator import Batch, CheckpointPart, FallbackWanted, LoadGranted, Sources, Suspended, VersionAnnounced, VersionsNeeded
from workers.messages.from_worker import (
    BatchRequest,
    CheckpointRequest,
    Draining,
    GroupFinished,
    GroupParked,
    Heartbeat,
    LoadRequest,
    Register,
    Republished,
    SourcesRequest,
    TransportFailed,
)
from workers.messages.groups import check_group, check_partial, head_step, samples, token_steps
from workers.messages.parts import Announcement, Group, HeldLease, Partial, Purpose, Role, Version

LIMIT = 1 << 20


def frames_of(message) -> list[bytes]:
    return msgspec.msgpack.decode(pack(message), type=list[bytes])


def sent(frames: list[bytes]) -> list[bytes]:
    """What a socket would bring of these frames."""
    content = msgspec.msgpack.encode(frames)
    return [content[start: start + 100] for start in range(0, len(content), 100)]


def test_routing_travels_as_bytes_and_without_it_nothing_more_does() -> None:
    plain = make_group("g1")
    assert b"routing" not in pack(GroupFinished(plain)) and samples(plain)[0].routing is None
    chosen = np.arange(2 * 2 * 6, dtype="<u2")  # two samples of a token, behind a prompt of two: two tokens each that were fed
    arrived = from_workers(LIMIT).decode(encode(GroupFinished(msgspec.structs.replace(plain, routing=Uint8.of(chosen.view(np.uint8))))))
    assert isinstance(arrived, GroupFinished)
    check_group(arrived.group)
    told = [view.routing for view in samples(arrived.group)]
    assert [np.array_equal(rows.view("<u2"), chosen.reshape(2, 2, 6)[index]) for index, rows in enumerate(told)] == [True, True]  # type: ignore[union-attr]
    wrong = msgspec.structs.replace(plain, routing=Uint8.of(np.zeros(7, np.uint8)))
    with pytest.raises(MessageError, match="as many bytes"):
        check_group(wrong)


@st.composite
def groups(draw) -> Group:
    lengths = draw(st.lists(st.integers(1, 9), min_size=1, max_size=6))
    total = sum(lengths)
    runs, left = [], total
    while left:
        runs.append(draw(st.integers(1, left)))
        left -= runs[-1]
    floats = st.floats(-100, 100, width=32)
    numbers = st.integers(0, 2**31 - 1)

    def many(strategy, count):
        return draw(st.lists(strategy, min_size=count, max_size=count))

    purpose = draw(st.sampled_from(Purpose))
    number = draw(st.integers(0, 10**15 - 1))
    return Group(
        group_id=f"g{number}" if purpose is Purpose.training else f"e{number % 10**9}.7", attempt=draw(st.integers(0, 9)), purpose=purpose,
        prompt_id="p", prompt=Int32.of(draw(st.lists(numbers, min_size=1, max_size=9))), lengths=Int32.of(lengths),
        tokens=Int32.of(many(numbers, total)), logprobs=Float32.of(np.array(many(floats, total), np.float32)),
        loss_mask=Bool.of(np.array(many(st.booleans(), total), bool)), rewards=Float32.of(np.array(many(floats, len(lengths)), np.float32)),
        scores=Float32.of(np.array(many(floats, len(lengths)), np.float32)), epochs=Int32.of(many(st.integers(1, 3), len(runs))),
        steps=Int32.of(many(st.integers(0, 99), len(runs))), run_lengths=Int32.of(runs))


@given(groups())
@settings(max_examples=150, deadline=None)
def test_a_group_comes_back_as_it_was(group: Group) -> None:
    back = from_workers(LIMIT).decode(sent(frames_of(GroupFinished(group)))).group
    for name in Group.__struct_fields__:
        before, after = getattr(group, name), getattr(back, name)
        if isinstance(before, np.ndarray):
            assert type(after) is type(before) and after.dtype == before.dtype and np.array_equal(before, after)
        else:
            assert before == after
    check_group(back)
    assert [len(view.tokens) for view in samples(back)] == group.lengths.tolist()
    assert len(token_steps(back)) == group.tokens.size
    assert head_step(back) == min(int(view.steps[0]) for view in samples(back))


@given(st.lists(groups(), max_size=3))
@settings(max_examples=50, deadline=None)
def test_a_batch_of_groups_comes_back(batch: list[Group]) -> None:
    back = from_coordinator(LIMIT).decode(encode(Batch(3, 1, 4, batch, [[0], [], [2, 1]], 7.25)))
    assert (back.step, back.share, back.num_shares, back.formed_at) == (3, 1, 4, 7.25)
    assert back.minibatches == [[0], [], [2, 1]]
    assert [group.tokens.tolist() for group in back.groups] == [group.tokens.tolist() for group in batch]


@given(st.lists(st.binary(max_size=200), max_size=6))
@settings(max_examples=300, deadline=None)
def test_arbitrary_bytes_never_decode_and_never_crash(frames: list[bytes]) -> None:
    for decoder in (from_workers(LIMIT), from_coordinator(LIMIT)):
        for pieces in (frames, sent(frames)):
            with pytest.raises(MessageError):
                decoder.decode(pieces)


@given(groups(), st.data())
@settings(max_examples=200, deadline=None)
def test_a_damaged_message_is_refused_or_is_still_whole(group: Group, data: st.DataObject) -> None:
    frames = frames_of(GroupFinished(group))
    index = data.draw(st.integers(0, len(frames) - 1))
    damage = data.draw(st.sampled_from(["cut", "grow", "drop", "repeat"]))
    if damage == "cut" and frames[index]:
        frames[index] = frames[index][:-1]
    elif damage == "grow":
        frames[index] += b"\0"
    elif damage == "drop":
        del frames[index]
    else:
        frames.insert(index, frames[index])
    if frames == frames_of(GroupFinished(group)):
        return
    with pytest.raises(MessageError):
        from_workers(LIMIT).decode(sent(frames))


def encoded_with(change) -> list[bytes]:
    frames = frames_of(GroupFinished(make_group()))
    header = msgspec.msgpack.decode(frames[0])
    change(header)
    return [msgspec.msgpack.encode(header), *frames[1:]]


@pytest.mark.parametrize(("change", "words"), [
    (lambda header: header.update(type="Surprise"), "Surprise"),
    (lambda header: header.update(extra=1), "extra"),
    (lambda header: header["group"].pop("prompt"), "prompt"),
    (lambda header: header["group"].update(attempt="three"), "attempt"),
    (lambda header: header["group"].update(attempt=-1), "attempt"),
    (lambda header: header["group"].update(tokens=[1, 1]), "frame 1"),
    (lambda header: header["group"].update(tokens=[99, 1]), "frame 99"),
    (lambda header: header["group"].update(tokens=[3, 1]), "bytes"),
    (lambda header: header["group"].update(tokens=[3, 2.0]), "reference"),
    (lambda header: header["group"].update(tokens="abcd"), "reference"),
])
def test_a_wrong_header_is_refused_with_the_reason(change, words: str) -> None:
    with pytest.raises(MessageError, match=words):
        from_workers(LIMIT).decode(sent(encoded_with(change)))


def test_wrong_mask_bytes_are_refused() -> None:
    frames = frames_of(GroupFinished(make_group()))
    where = msgspec.msgpack.decode(frames[0])["group"]["loss_mask"][0]
    frames[where] = b"\x01\x02"
    with pytest.raises(MessageError, match="0 or 1"):
        from_workers(LIMIT).decode(sent(frames))


@pytest.mark.parametrize("opening", [b"\x91", b"\x81\xa1x", b"\x82\xa1x\x91", b"\xc9\0\0\0\1\0"])
def test_what_is_nested_deeper_than_any_message_is_refused(opening: bytes) -> None:
    deep = opening * 50_000
    for header in (deep, b"\x82\xa1x" + deep, b"\x82\xa5group" + deep):  # under a key that is read before the type
        for decoder in (from_workers(LIMIT), from_coordinator(LIMIT)):
            for pieces in (sent([header]), [header]):
                with pytest.raises(MessageError):
                    decoder.decode(pieces)


@given(st.integers(0, 3 * MAX_PIECE))
@settings(max_examples=20, deadline=None)
def test_no_piece_is_larger_than_a_socket_takes(size: int) -> None:
    message = Draining("x" * size)
    pieces = encode(message)
    assert all(0 < len(piece) <= MAX_PIECE for piece in pieces) and from_workers(LIMIT).decode(pieces) == message


@given(st.lists(st.integers(0, 3 * MAX_PIECE), min_size=1, max_size=6))
@settings(max_examples=30, deadline=None)
def test_large_arrays_are_sent_as_they_are(sizes: list[int]) -> None:
    groups = [msgspec.structs.replace(make_group(), tokens=Int32.of(np.arange(size, dtype=np.int32))) for size in sizes]
    batch = Batch(0, 0, 1, groups, [], 0.0)
    pieces = encode(batch)
    assert b"".join(pieces) == pack(batch) == b"".join(buffers(batch)) and all(0 < len(piece) <= MAX_PIECE for piece in pieces)
    for group in groups:
        if group.tokens.nbytes > MAX_PIECE:
            assert any(np.shares_memory(np.frombuffer(piece, np.uint8), group.tokens) for piece in pieces), "no copy"
    assert len(pieces) <= 2 + sum(2 + group.tokens.nbytes // MAX_PIECE for group in groups if group.tokens.nbytes > SMALL) + len(sizes)
    decoded = from_coordinator(1 << 30).decode(pieces)
    assert isinstance(decoded, Batch) and all(np.array_equal(one.tokens, other.tokens) for one, other in zip(decoded.groups, groups, strict=True))


def test_a_message_over_the_limit_is_refused_with_the_remedy() -> None:
    with pytest.raises(MessageError, match="max_message_mb"):
        from_workers(10).decode(encode(GroupFinished(make_group())))


def test_directions_are_separate() -> None:
    with pytest.raises(MessageError):
        from_coordinator(LIMIT).decode(encode(Register(Role.rollout, "host", 1)))
    with pytest.raises(MessageError):
        from_workers(LIMIT).decode(encode(VersionsNeeded(Version(1, 0))))


HELD = HeldLease("g1", 3, Purpose.training, Version(1, 2))
LESS = Announcement(Version(1, 2), "", "digest", ["tcp://10.0.0.1:4711"])
MORE = msgspec.structs.replace(LESS, folder="/weights")


def test_which_announcement_offers_more() -> None:
    assert MORE.offers_more_than(LESS) and not LESS.offers_more_than(MORE) and not MORE.offers_more_than(MORE)
    assert msgspec.structs.replace(MORE, sources=["tcp://a", "tcp://b"]).offers_more_than(MORE)
    for other in (msgspec.structs.replace(MORE, version=Version(1, 3)), msgspec.structs.replace(MORE, digest="another")):
        assert not other.offers_more_than(LESS), "that is another version"


@pytest.mark.parametrize("message", [
    Register(Role.trainer, "host", 7), Register(Role.rollout, "host", 7, leases=[HELD], job="12_3"), Heartbeat(held=Version(1, 2)),
    Heartbeat(capacity=3, leases=[HELD, HELD]), Draining("time limit"), CheckpointRequest(4, "/checkpoint", True),
    BatchRequest(4), BatchRequest(4, 1, 2), Register(Role.rollout, "host", 7, serves="tcp://10.0.0.1:4711"), Heartbeat(tokens_in_flight=900),
    SourcesRequest(Version(1, 2), ["tcp://10.0.0.2:4711"]), LoadRequest(Version(1, 2)), TransportFailed(Version(1, 2), "zmq", "no route"),
    Republished(MORE)])
def test_small_messages_come_back(message) -> None:
    assert from_workers(LIMIT).decode(encode(message)) == message


@pytest.mark.parametrize("message", [
    CheckpointPart(4, True), Suspended("time limit"), VersionsNeeded(Version(2, 7)), LoadGranted(Version(1, 2)), FallbackWanted("zmq", "no route"),
    Sources(Version(1, 2), ["tcp://10.0.0.1:4711"], False), VersionAnnounced(MORE)])
def test_small_messages_of_the_coordinator_come_back(message) -> None:
    assert from_coordinator(LIMIT).decode(encode(message)) == message


@pytest.mark.parametrize("capacity", [-1, 1_000_001])
def test_a_capacity_out_of_bounds_is_refused(capacity: int) -> None:
    with pytest.raises(MessageError, match="capacity"):
        from_workers(LIMIT).decode(encode(Heartbeat(capacity=capacity)))


def make_partial() -> Partial:
    """Two samples, of two tokens and none."""
    return Partial(
        group_id="g0", attempt=1, purpose=Purpose.training, lengths=Int32.of([2, 0]), finished=Bool.of([True, False]), tokens=Int32.of([5, 6]),
        logprobs=Float32.of([-0.5, -1.5]), epochs=Int32.of([1, 2]), steps=Int32.of([4, 3]), run_lengths=Int32.of([1, 1]))


def test_a_parked_group_comes_back_and_from_a_file_too() -> None:
    message, decoder = GroupParked(make_partial()), from_workers(LIMIT)
    for back in (decoder.decode(encode(message)), decoder.unpack(pack(message))):
        assert isinstance(back, GroupParked)
        for name in Partial.__struct_fields__:
            before, after = getattr(message.partial, name), getattr(back.partial, name)
            assert type(after) is type(before) and np.array_equal(before, after)


@given(st.integers(0, 400), st.integers(1, 255))
@settings(max_examples=200, deadline=None)
def test_a_damaged_file_is_refused_or_is_still_a_message(place: int, change: int) -> None:
    content = bytearray(pack(GroupParked(make_partial())))
    with pytest.raises(MessageError):
        from_workers(LIMIT).unpack(bytes(content[: place % len(content)]))
    content[place % len(content)] ^= change
    try:
        back = from_workers(LIMIT).unpack(bytes(content))
    except MessageError:
        return
    assert pack(back) != pack(GroupParked(make_partial())), "the change must show"


@pytest.mark.parametrize(("field", "value"), [
    ("lengths", Int32.of(np.array([], np.int32))), ("lengths", Int32.of([3, -1])), ("lengths", Int32.of([1, 0])), ("finished", Bool.of([True])),
    ("tokens", Int32.of([5])), ("tokens", Int32.of([5, -6])), ("logprobs", Float32.of(np.array([0, np.inf], np.float32))),
    ("run_lengths", Int32.of([1, 2])), ("run_lengths", Int32.of([2, 0])), ("steps", Int32.of([-1, 0])), ("epochs", Int32.of([1]))])
def test_partials_whose_arrays_do_not_fit_together_are_refused(field: str, value) -> None:
    check_partial(make_partial())
    with pytest.raises(MessageError, match="group g0, given back"):
        check_partial(msgspec.structs.replace(make_partial(), **{field: value}))


@pytest.mark.parametrize(("kind", "values"), [(Int32, [0.5]), (Int32, np.zeros((2, 2), np.int32)), (Bool, [1.5]), (Float32, ["a"])])
def test_arrays_that_do_not_fit_are_not_sent(kind, values) -> None:
    with pytest.raises((ValueError, TypeError)):
        kind.of(values)


def test_a_plain_array_in_an_array_field_is_not_sent() -> None:
    with pytest.raises(TypeError, match="Int32"):
        encode(GroupFinished(msgspec.structs.replace(make_group(), tokens=np.zeros(1, np.int32))))


@pytest.mark.parametrize(("field", "value"), [
    ("lengths", Int32.of([2])), ("lengths", Int32.of([0])), ("logprobs", Float32.of([])), ("logprobs", Float32.of(np.array([np.nan], np.float32))),
    ("rewards", Float32.of([1, 2, 3])), ("run_lengths", Int32.of([2])), ("steps", Int32.of([-1])),
    ("prompt", Int32.of([])), ("tokens", Int32.of([-3])),
])
def test_groups_whose_arrays_do_not_fit_together_are_refused(field: str, value) -> None:
    with pytest.raises(MessageError, match="group g0"):
        check_group(msgspec.structs.replace(make_group(), **{field: value}))


@given(st.integers(0, 10**6), st.integers(0, 10**6))
def test_versions_read_back(epoch: int, step: int) -> None:
    assert Version.parse(str(Version(epoch, step))) == Version(epoch, step)


@pytest.mark.parametrize("text", ["", "1", "1.", ".1", "a.b", "-1.2", "1.2.3", "default"])
def test_anything_else_is_no_version(text: str) -> None:
    with pytest.raises(ValueError, match="EPOCH.STEP"):
        Version.parse(text)


def test_more_arrays_than_any_message_has_are_refused_before_they_are_made() -> None:
    number = 1_000_000
    content = b"\xdd" + number.to_bytes(4, "big") + b"\xc4\0" * number
    tracemalloc.start()
    try:
        with pytest.raises(MessageError, match="malformed message"):
            from_workers(1 << 28).unpack(content)
        assert tracemalloc.get_traced_memory()[1] < 8 << 20
    finally:
        tracemalloc.stop()
