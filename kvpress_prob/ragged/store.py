"""A ragged key/value store: a different number of entries for every batch row and KV head.

One flat buffer holds the entries of all segments, and a segment is one (batch row, KV head) pair, batch rows
outermost::

    keys    [c, d]     |seg 0 ......|slack|seg 1 ..|slack|seg 2 ............|slack|
    values  [c, dv]    the same places
    log_w   [c]        float32 log importance weight of each entry
    start   [s]        int64, first place of each segment
    length  [s]        int64, entries of each segment

``columns`` are further numbers of each entry, by name, for whoever evicts by them; most stores have none.
``room`` entries still fit behind *every* segment, so appending writes in place and asks no device for a length;
``with_room`` makes more for many tokens at a time. What is behind a segment's end is never read.
"""

from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Any

import torch
from jaxtyping import Bool, Float, Float32, Int64
from torch import Tensor

MIN_ROOM, MAX_ROOM = 4, 32
"""Smallest and largest slack behind each segment of a freshly packed store."""
GROWTH = 0.25
"""Room made at each growth, as a fraction of the mean segment length."""
_BUFFERS = ("keys", "values", "log_w", "start", "length")
MIN_GROWTH, MAX_GROWTH = 64, 256
"""Smallest and largest room made at a growth. Copying every 256 tokens what every token reads costs a hundredth."""


def initial_room(lengths: list[int]) -> int:
    """Slack behind each segment of a new store: an eighth of the mean segment, between 4 and 32."""
    return min(max(sum(lengths) // (8 * len(lengths)), MIN_ROOM), MAX_ROOM)


@dataclass
class RaggedKV:
    """The store. ``b * hkv = s`` segments, capacity ``c`` places.

    Attributes
    ----------
    keys : Float[Tensor, "c d"]
    values : Float[Tensor, "c dv"]
        Same dtype and device as ``keys``.
    log_w : Float32[Tensor, "c"]
        Natural logarithm of the importance weight.
    start, length : Int64[Tensor, "s"]
        On the device of the keys. Segments are disjoint and in increasing order.
    batch : int
        Number of batch rows.
    room : int
        Entries that fit behind each segment.
    columns : dict of str to Tensor
        Companions [c, ...] of the entries, at the same places. Appending leaves them as they are: whoever added a
        column fills in the new entries.
    row_starts : list of int, optional
        First place of each batch row, as the host knows it; None asks the device when it is needed.
    """

    keys: Float[Tensor, "c d"]
    values: Float[Tensor, "c dv"]
    log_w: Float32[Tensor, " c"]
    start: Int64[Tensor, " s"]
    length: Int64[Tensor, " s"]
    batch: int
    room: int
    columns: dict[str, Tensor] = field(default_factory=dict)
    row_starts: list[int] | None = None

    def __deepcopy__(self, memo: dict[int, object]) -> "RaggedKV":
        """A copy that can be appended to outside ``torch.inference_mode`` wherever it was made."""
        with torch.inference_mode(False), torch.no_grad():
            columns = {name: column.clone() for name, column in self.columns.items()}
            return replace(self, **{name: getattr(self, name).clone() for name in _BUFFERS}, columns=columns)

    def __setstate__(self, state: dict[str, Any]) -> None:
        """What ``pickle`` calls, maybe inside ``torch.inference_mode``."""
        with torch.inference_mode(False), torch.no_grad():
            for name in _BUFFERS:
                state[name] = state[name].clone() if state[name].is_inference() else state[name]
            state["columns"] = {name: it.clone() for name, it in state["columns"].items()}
            self.__dict__.update(state)

    def check_layout(self) -> None:
        """Raise ``ValueError`` unless every buffer's entries are stored one after the other, from whatever place of its
        storage on; operations compute addresses."""
        for name in ("keys", "values", "log_w", "start", "length"):
            buffer = getattr(self, name)
            if not buffer.is_contiguous():
                raise ValueError(f"the store's {name} must be contiguous, got strides {buffer.stride()}")

    @property
    def kv_heads(self) -> int:
        """KV heads per batch row."""
        return len(self.start) // self.batch

    @property
    def nbytes(self) -> int:
        """Bytes of the buffers, slack included."""
        return sum(tensor.untyped_storage().nbytes() for tensor in self.tensors)

    @property
    def place_bytes(self) -> int:
        """Bytes of one place of the buffers."""
        return sum(it[:1].nbytes for it in (self.keys, self.values, self.log_w, *self.columns.values()))

    @property
    def tensors(self) -> list[Tensor]:
        """All of them."""
        return [self.keys, self.values, self.log_w, self.start, self.length, *self.columns.values()]

    @classmethod
    def pack(
        cls,
        keys: Float[Tensor, "b hkv t d"],
        values: Float[Tensor, "b hkv t dv"],
        kept: Bool[Tensor, "b hkv t"],
        log_w: Float[Tensor, "b hkv t"],
        room: int | None = None,
        lengths: list[int] | None = None,
    ) -> "RaggedKV":
        """Copy the kept entries of dense keys and values, in position order, into a new store.

        The result shares no memory with the arguments. It can be appended to outside ``torch.inference_mode`` even when
        it was packed inside.

        Parameters
        ----------
        keys, values, kept, log_w
            On one device.
        room : int, optional
            Entries that fit behind each segment. Default: ``initial_room``.
        lengths : list of int, optional
            Kept entries of each segment, ``kept.sum(-1)``. Without them they are read here: the host waits.
        """
        b, heads, t, _ = keys.shape
        if lengths is None:
            lengths = kept.sum(-1).flatten().tolist()
        room = initial_room(lengths) if room is None else room
        with torch.inference_mode(False), torch.no_grad():
            start, length, capacity, starts = _layout(lengths, room, keys.device)
            flags = kept.reshape(b * heads, t)
            place = start.unsqueeze(-1) + flags.cumsum(-1) - 1
            # Evicted entries meet in one place behind the last.
            place = torch.where(flags, place, capacity).flatten()
            source = place.new_zeros(capacity + 1)
            source.scatter_(0, place, torch.arange(b * heads * t, device=keys.device))
            source = source[:capacity]
            store = cls(
                keys.reshape(-1, keys.shape[-1]).index_select(0, source),
                values.reshape(-1, values.shape[-1]).index_select(0, source),
                log_w.reshape(-1).index_select(0, source).float(),
                start,
                length,
                b,
                room,
                row_starts=starts[::heads],
            )
        return store

    @classmethod
    def empty(cls, keys: Tensor, values: Tensor, lengths: list[int], batch: int, room: int) -> "RaggedKV":
        """Uninitialised store for segments of the given lengths; dtype, device and widths as in ``keys`` and
        ``values``."""
        start, length, capacity, starts = _layout(lengths, room, keys.device)
        return cls(
            keys.new_empty(capacity, keys.shape[-1]),
            values.new_empty(capacity, values.shape[-1]),
            torch.empty(capacity, dtype=torch.float32, device=keys.device),
            start,
            length,
            batch,
            room,
            row_starts=starts[:: max(len(lengths) // batch, 1)],
        )

    def with_room(self, n: int, growth: int | None = None) -> "RaggedKV":
        """This store if ``n`` more entries fit behind each segment, else a copy with room for them, and for ``growth``
        at least: by default a quarter of the mean segment, between 64 and 256."""
        if n <= self.room:
            return self
        # Room is put in behind every segment without asking the device for a length.
        segments, capacity = len(self.start), len(self.log_w)
        if growth is None:
            growth = min(max(int(GROWTH * (capacity - segments * self.room) / segments), MIN_GROWTH), MAX_GROWTH)
        more, device = max(n, growth) - self.room, self.start.device
        place = torch.arange(capacity, device=device)
        place += more * (torch.searchsorted(self.start, place, right=True) - 1).clamp(min=0)

        def grown(old: Tensor) -> Tensor:
            return old.new_empty(capacity + segments * more, *old.shape[1:]).index_copy_(0, place, old)

        starts = self.row_starts
        if starts is not None:
            starts = [begin + row * self.kv_heads * more for row, begin in enumerate(starts)]
        with torch.inference_mode(False), torch.no_grad():
            return RaggedKV(
                *(grown(old) for old in (self.keys, self.values, self.log_w)),
                start=self.start + more * torch.arange(segments, device=device),
                length=self.length.clone(),
                batch=self.batch,
                room=self.room + more,
                columns={name: grown(old) for name, old in self.columns.items()},
                row_starts=starts,
            )

    def entries(self) -> tuple[Int64[Tensor, " n"], Int64[Tensor, " n"]]:
        """Place and segment of every stored entry, segment after segment. Asks the device for their number."""
        segment = torch.arange(len(self.start), device=self.start.device).repeat_interleave(self.length)
        first = self.length.cumsum(0) - self.length
        place = torch.arange(len(segment), device=segment.device) + (self.start - first)[segment]
        return place, segment

    def keep(self, kept: Bool[Tensor, " n"], room: int) -> "RaggedKV":
        """A new store of some of the ``entries``, in their order, with ``room`` behind each segment."""
        place, segment = self.entries()
        place, segment = place[kept], segment[kept]
        length = torch.bincount(segment, minlength=len(self.start))
        with torch.inference_mode(False), torch.no_grad():
            new = RaggedKV.empty(self.keys, self.values, length.tolist(), self.batch, room)
            first = length.cumsum(0) - length
            target = torch.arange(len(place), device=place.device) + (new.start - first)[segment]
            new.columns = {name: old.new_empty(len(new.log_w), *old.shape[1:]) for name, old in self.columns.items()}
            for name, old in self.columns.items():
                new.columns[name].index_copy_(0, target, old[place])
            for mine, old in ((new.keys, self.keys), (new.values, self.values), (new.log_w, self.log_w)):
                mine.index_copy_(0, target, old[place])
        return new

    def newest(self, n: int) -> tuple[Float[Tensor, "b hkv n d"], Float[Tensor, "b hkv n dv"]]:
        """Copies of the newest ``n`` keys and values of every segment, which must have so many."""
        places = (self.start + self.length).unsqueeze(-1) - torch.arange(n, 0, -1, device=self.start.device)
        places = places.unflatten(0, (self.batch, -1))
        return self.keys[places], self.values[places]

    def with_columns(self, **columns: Tensor) -> "RaggedKV":
        """This store with further columns; its buffers are shared."""
        return replace(self, columns={**self.columns, **columns})

    def select_rows(self, rows: list[int]) -> "RaggedKV":
        """A copy with the given batch rows, in the given order; a row may be named several times.

        A row's segments lie together, slack included, so a row is copied as one piece.
        """
        first = self._row_starts()
        pieces = [slice(first[row], first[row + 1]) for row in rows]
        starts = list(accumulate((piece.stop - piece.start for piece in pieces), initial=0))
        device, heads = self.start.device, self.kv_heads
        segment = torch.tensor([row * heads + head for row in rows for head in range(heads)], device=device)
        moved = [to - piece.start for to, piece in zip(starts, pieces, strict=False) for _ in range(heads)]
        with torch.inference_mode(False), torch.no_grad():
            return RaggedKV(
                *(torch.cat([old[piece] for piece in pieces]) for old in (self.keys, self.values, self.log_w)),
                start=self.start[segment] + torch.tensor(moved, device=device),
                length=self.length[segment],
                batch=len(rows),
                room=self.room,
                columns={name: torch.cat([old[piece] for piece in pieces]) for name, old in self.columns.items()},
                row_starts=starts[:-1],
            )

    def _row_starts(self) -> list[int]:
        """First place of each batch row, and the place behind the last."""
        if self.row_starts is None:
            self.row_starts = self.start[:: self.kv_heads].tolist()
        return [*self.row_starts, len(self.log_w)]

    def truncate(self, n: int) -> None:
        """Drop the newest ``n`` entries of every segment."""
        self.length.sub_(n)
        self.room += n

    def aligned(
        self,
    ) -> tuple[Float[Tensor, "s t d"], Float[Tensor, "s t dv"], Float32[Tensor, "s t"], Bool[Tensor, "s t"]]:
        """Dense copies of keys, values and log-weights, every segment ending at the last of ``t`` places, and which
        places hold an entry; ``t`` is the longest segment's length. Other places hold whatever, with log-weight 0."""
        t = int(self.length.max())
        place = torch.arange(-t, 0, device=self.start.device) + (self.start + self.length).unsqueeze(-1)  # [s t]
        valid = place >= self.start.unsqueeze(-1)
        place = torch.where(valid, place, self.start.unsqueeze(-1))
        return self.keys[place], self.values[place], torch.where(valid, self.log_w[place], 0), valid

    def segment(self, row: int, head: int) -> tuple[Tensor, Tensor, Tensor]:
        """Views of one segment's keys [n, d], values [n, dv] and log-weights [n]."""
        index = row * self.kv_heads + head
        begin = int(self.start[index])
        end = begin + int(self.length[index])
        return self.keys[begin:end], self.values[begin:end], self.log_w[begin:end]


def _layout(lengths: list[int], room: int, device: torch.device) -> tuple[Tensor, Tensor, int, list[int]]:
    """Starts and lengths of segments, one behind the other with room between, the capacity, and the starts as a
    list."""
    starts = list(accumulate((length + room for length in lengths), initial=0))
    start, length = (torch.tensor(it, dtype=torch.int64, device=device) for it in (starts[:-1], lengths))
    return start, length, starts[-1], starts[:-1]
