"""Mutations of serialized messages: of their bytes, of their fields' order, of single values."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from typing import Any

from google.protobuf.message import Message

_INTEGERS = (
    *(0, 1, 2, 3, 4, 5, 6, 7, 8, 28, 127, 128, 255, 4096, 4097, 65536, 65537, 2**20, 2**20 + 1),
    *(2**31 - 1, 2**31, 2**32, 2**58, 2**62, 2**63 - 1, -1, -2, -4, -(2**31), -(2**63)),
)
_FLOATS = (0.0, -0.0, 1.0, -1.0, 0.5, 1e-300, 1e308, math.inf, -math.inf, math.nan, 2.0**31)
_VARINTS = (b"\x00", b"\x7f", b"\xff" * 9 + b"\x01", b"\xff" * 10, b"\x80" * 9 + b"\x01")
_MOST_EDITS = 4


class Mutator:
    """Makes mutants of a corpus; the same seed makes the same ones.

    Args:
      corpus: valid messages.
      seed: of all choices.
    """

    def __init__(self, corpus: list[Message], seed: int) -> None:
        self._random = random.Random(seed)
        self._corpus = corpus
        self._bytes = [message.SerializeToString() for message in corpus]
        self._on_bytes: tuple[Callable[[bytes], bytes], ...] = (
            self._flip_bits,
            self._truncate,
            self._splice,
            self._repeat,
            self._delete,
            self._insert_varint,
            self._shuffle_fields,
        )

    def next(self) -> tuple[int, bytes]:
        """The index of the message that is mutated, and the mutant."""
        index = self._random.randrange(len(self._corpus))
        if self._random.random() < 0.5:
            return index, self._random.choice(self._on_bytes)(self._bytes[index])
        return index, self._change_values(self._corpus[index])

    def _flip_bits(self, data: bytes) -> bytes:
        mutant = bytearray(data)
        # Most of a message is tensor bytes: half of the time stay in what comes before them.
        end = min(len(mutant), 64) if self._random.random() < 0.5 else len(mutant)
        for _ in range(self._random.randint(1, _MOST_EDITS)):
            mutant[self._random.randrange(end)] ^= 1 << self._random.randrange(8)
        return bytes(mutant)

    def _truncate(self, data: bytes) -> bytes:
        return data[: self._random.randrange(len(data))]

    def _splice(self, data: bytes) -> bytes:
        other = self._random.choice(self._bytes)
        start = data[: self._random.randrange(len(data))]
        return start + other[self._random.randrange(len(other)) :]

    def _repeat(self, data: bytes) -> bytes:
        first, last = self._range(data)
        return data[:last] + data[first:last] * self._random.randint(1, _MOST_EDITS) + data[last:]

    def _delete(self, data: bytes) -> bytes:
        first, last = self._range(data)
        return data[:first] + data[last:]

    def _insert_varint(self, data: bytes) -> bytes:
        at = self._random.randrange(len(data))
        skip = self._random.randint(0, 2)
        return data[:at] + self._random.choice(_VARINTS) + data[at + skip :]

    def _shuffle_fields(self, data: bytes) -> bytes:
        """Whole fields of the outer message in another order, some twice and some not at all."""
        fields = list(_fields(data))
        return b"".join(self._random.choices(fields, k=len(fields) + self._random.randint(-1, 2)))

    def _range(self, data: bytes) -> tuple[int, int]:
        first = self._random.randrange(len(data))
        return first, min(len(data), first + self._random.randint(1, 64))

    def _change_values(self, message: Message) -> bytes:
        mutant = type(message)()
        mutant.CopyFrom(message)
        # Mostly one: what is changed twice is refused for the first of the two.
        for _ in range(self._random.choice((1, 1, 1, _MOST_EDITS))):
            self._change_one(mutant)
        return mutant.SerializeToString()

    def _change_one(self, message: Message) -> None:
        """Walks to a random set field and changes it; sometimes clears or sets one on the way."""
        while True:
            fields = message.ListFields()
            if not fields or self._random.random() < 0.1:
                self._set_any(message)
                return
            field, value = self._random.choice(fields)
            if field.label == field.LABEL_REPEATED:
                self._change_list(field, value)
                return
            if field.message_type is None:
                setattr(message, field.name, self._value(field, value))
                return
            if self._random.random() < 0.05:
                message.ClearField(field.name)
                return
            message = value

    def _set_any(self, message: Message) -> None:
        """Sets some field of the message's type, whether it was set or not."""
        if not message.DESCRIPTOR.fields:
            return
        field = self._random.choice(message.DESCRIPTOR.fields)
        if field.label == field.LABEL_REPEATED:
            self._change_list(field, getattr(message, field.name))
        elif field.message_type is not None:
            getattr(message, field.name).SetInParent()
        else:
            setattr(message, field.name, self._value(field, getattr(message, field.name)))

    def _change_list(self, field: Any, values: Any) -> None:
        if field.message_type is not None:
            values.add()
            return
        choice = self._random.random()
        if not values or choice < 0.1:
            values.append(self._value(field, 0))
        elif choice < 0.2:
            del values[self._random.randrange(len(values))]
        elif choice < 0.3:
            i, j = (self._random.randrange(len(values)) for _ in range(2))
            values[i], values[j] = values[j], values[i]
        else:
            i = self._random.randrange(len(values))
            values[i] = self._value(field, values[i])

    def _value(self, field: Any, old: Any) -> Any:
        kind = field.cpp_type
        if kind == field.CPPTYPE_STRING:
            if field.type == field.TYPE_BYTES:
                return self._random.choice((b"", old[:-1], old + b"\0", bytes(len(old))))
            return self._random.choice(("", "q", "kv", "x" * 5000, old + "\N{SNOWMAN}"))
        if kind in (field.CPPTYPE_FLOAT, field.CPPTYPE_DOUBLE):
            return self._random.choice(_FLOATS)
        if kind == field.CPPTYPE_BOOL:
            return not old
        near = old + self._random.choice((-1, 1))
        number = near if self._random.random() < 0.3 else self._random.choice(_INTEGERS)
        if kind == field.CPPTYPE_INT64:
            return max(-(2**63), min(2**63 - 1, number))
        if kind == field.CPPTYPE_UINT64:
            return number % 2**64
        return max(-(2**31), min(2**31 - 1, number))  # Enums.


def _fields(data: bytes):
    """The fields of a valid message's outer level, as bytes."""
    start = 0
    while start < len(data):
        tag, end = _varint(data, start)
        if tag & 7 == 0:
            _, end = _varint(data, end)
        elif tag & 7 == 2:
            size, end = _varint(data, end)
            end += size
        else:
            end += 8 if tag & 7 == 1 else 4
        yield data[start:end]
        start = end


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        value |= (data[at] & 0x7F) << shift
        shift += 7
        at += 1
        if data[at - 1] < 0x80:
            return value, at
