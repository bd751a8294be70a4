"""What is almost a message: real ones, changed in their bytes or in their structure. All chance comes from the given generator."""

from __future__ import annotations

from random import Random
from typing import Any

import msgspec

BOUNDS = [0, 1, -1, 2**31 - 1, 2**31, -(2**31) - 1, 2**53, 2**63 - 1, 2**63, 2**64 - 1, float("nan"), float("inf"), -float("inf"), 3e38, 1e308, "",
          "\0", "x" * 5000, b"\xff" * 40, None, True, [], {}, [[]] * 50, "g999999999", "g-1", "../../etc/passwd", "tcp://127.0.0.1:1"]
DEEP = b"\x91" * 20_000


def mutate_bytes(random: Random, content: bytes) -> bytes:
    """Change bytes anywhere."""
    changed = bytearray(content)
    for _ in range(random.choice((1, 1, 1, 2, 5, 20))):
        place = random.randrange(len(changed) + 1)
        match random.randrange(6):
            case 0 if changed:
                changed[place % len(changed)] ^= 1 << random.randrange(8)
            case 1:
                del changed[place: place + random.choice((1, 4, 64, 5000))]
            case 2:
                changed[place:place] = random.randbytes(random.choice((1, 8, 300)))
            case 3:
                changed[place:place] = changed[place: place + random.choice((4, 100))]
            case 4:
                changed[place: place + 4] = random.choice((b"\xff\xff\xff\xff", b"\xdd\xff\xff\xff", b"\xc6\x7f\xff\xff", bytes(4)))
            case _:
                changed[place:place] = DEEP if random.random() < 0.1 else b"\x81\xa1x"
    return bytes(changed)


def mutate_value(random: Random, value: Any) -> Any:
    """Change something in decoded msgpack or JSON: a leaf, a key, a list."""
    if isinstance(value, dict) and value and random.random() < 0.85:
        key = random.choice(list(value))
        changed = dict(value)
        match random.randrange(8):
            case 0:
                del changed[key]
            case 1:
                changed[random.choice(("x", "type", str(key)))] = changed.pop(key)
            case 2:
                changed["unknown"] = random.choice(BOUNDS)
            case _:
                changed[key] = mutate_value(random, value[key])
        return changed
    if isinstance(value, list) and value and random.random() < 0.85:
        place, changed_list = random.randrange(len(value)), list(value)
        match random.randrange(5):
            case 0:
                del changed_list[place]
            case 1:
                changed_list *= random.choice((0, 2, 50))
            case _:
                changed_list[place] = mutate_value(random, value[place])
        return changed_list
    if isinstance(value, bytes) and random.random() < 0.7:
        return mutate_bytes(random, value)
    if isinstance(value, int) and not isinstance(value, bool) and random.random() < 0.5:
        return value + random.choice((1, -1, 1000, -1000, 2**31, -(2**31)))
    return random.choice(BOUNDS)


def mutate_message(random: Random, content: bytes) -> bytes:
    """Change what `codec.pack` gave: its bytes, its header, its arrays, or all of these."""
    if random.random() < 0.25:
        return mutate_bytes(random, content)
    frames = msgspec.msgpack.decode(content, type=list[bytes])
    if len(frames) > 1 and random.random() < 0.4:
        place = random.randrange(1, len(frames))
        frames[place] = mutate_array(random, frames[place])
    if random.random() < 0.8:
        header = mutate_value(random, msgspec.msgpack.decode(frames[0]))
        if random.random() < 0.02:
            header = {"x": msgspec.Raw(DEEP + b"\xc0"), **(header if isinstance(header, dict) else {})}
        try:
            frames[0] = msgspec.msgpack.encode(header)
        except (OverflowError, TypeError):  # no msgpack has such a number
            frames[0] = mutate_bytes(random, frames[0])
    return msgspec.msgpack.encode(frames)


def mutate_array(random: Random, content: bytes) -> bytes:
    """Change an array, so that it still is one more often than not."""
    words = (bytes(4), b"\xff\xff\xff\x7f", b"\xff\xff\xff\xff", b"\x00\x00\xc0\x7f", b"\x00\x00\x80\x7f", b"\x99\x76\x96\x7e", b"\1\0\0\0")
    if len(content) >= 4 and random.random() < 0.8:
        place = 4 * random.randrange(len(content) // 4)
        return content[:place] + random.choice(words) + content[place + 4:]
    return mutate_bytes(random, content)
