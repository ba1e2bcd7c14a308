"""The ragged store: round trips, in-place appends, growth, bytes."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvpress_prob.ops.append import append
from kvpress_prob.ragged import RaggedKV
from tests.helpers.stores import random_store


def segments(store):
    return [store.segment(row, head) for row in range(store.batch) for head in range(store.kv_heads)]


@given(st.integers(1, 3), st.integers(1, 4), st.integers(1, 30), st.integers(0, 9), st.integers(0, 5))
def test_pack_keeps_the_kept_entries_in_order(b, heads, t, seed, room):
    generator = torch.Generator().manual_seed(seed)
    keys, values = torch.randn(b, heads, t, 4, generator=generator), torch.randn(b, heads, t, 3, generator=generator)
    log_w = torch.randn(b, heads, t, generator=generator)
    kept = torch.rand(b, heads, t, generator=generator) < 0.5
    store = RaggedKV.pack(keys, values, kept, log_w, room)
    assert store.length.tolist() == kept.sum(-1).flatten().tolist()
    assert len(store.keys) == int(kept.sum()) + room * b * heads
    for row in range(b):
        for head in range(heads):
            k, v, w = store.segment(row, head)
            chosen = kept[row, head]
            assert torch.equal(k, keys[row, head, chosen])
            assert torch.equal(v, values[row, head, chosen])
            assert torch.equal(w, log_w[row, head, chosen])


def test_pack_shares_no_memory_with_its_arguments():
    keys = torch.randn(1, 1, 4, 2)
    store = RaggedKV.pack(keys, keys, torch.ones(1, 1, 4, dtype=torch.bool), torch.zeros(1, 1, 4))
    keys.zero_()
    assert (store.segment(0, 0)[0] != 0).all()


def test_bytes_are_the_formula():
    """Scenario S22: kept * (d + dv) * itemsize + 4 * kept + slack + two int64 per segment."""
    kept = torch.rand(2, 3, 100) < 0.25
    keys, values = torch.randn(2, 3, 100, 16).bfloat16(), torch.randn(2, 3, 100, 8).bfloat16()
    store = RaggedKV.pack(keys, values, kept, torch.zeros(2, 3, 100), room=7)
    places = int(kept.sum()) + 6 * 7
    assert store.nbytes == places * (16 + 8) * 2 + places * 4 + 6 * 2 * 8


def test_append_writes_in_place_behind_every_segment():
    store = random_store([3, 0, 7, 1], batch=2, d=4, dv=6, room=5)
    before = [tuple(part.clone() for part in segment) for segment in segments(store)]
    pointers = store.keys.data_ptr(), store.values.data_ptr(), store.log_w.data_ptr()
    keys, values = torch.randn(2, 2, 3, 4), torch.randn(2, 2, 3, 6)
    append(store, keys, values)
    assert store.room == 2
    assert pointers == (store.keys.data_ptr(), store.values.data_ptr(), store.log_w.data_ptr())
    for index, (old, new) in enumerate(zip(before, segments(store), strict=True)):
        row, head = divmod(index, 2)
        for part, added, whole in zip(old, (keys, values), new[:2], strict=False):
            assert torch.equal(whole, torch.cat([part, added[row, head]]))
        assert torch.equal(new[2], torch.cat([old[2], torch.zeros(3)]))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"keys": torch.randn(1, 2, 3, 5)}, r"keys must have shape \(1, 2, 3, 4\), got \(1, 2, 3, 5\)"),
        ({"values": torch.randn(1, 2, 2, 4)}, r"values must have shape \(1, 2, 3, 4\), got \(1, 2, 2, 4\)"),
        ({"keys": torch.randn(1, 2, 3, 4).half()}, "keys must be torch.float32 on cpu, got torch.float16 on cpu"),
    ],
)
def test_append_refuses_what_does_not_fit(change, message):
    store = random_store([2, 2], d=4)
    arguments = {"keys": torch.randn(1, 2, 3, 4), "values": torch.randn(1, 2, 3, 4), **change}
    with pytest.raises(ValueError, match=message):
        append(store, **arguments)
    assert store.length.tolist() == [2, 2]


def test_append_refuses_without_room():
    store = random_store([2, 2], d=4, room=1)
    with pytest.raises(ValueError, match="store must have room for 2 entries a segment, got room for 1"):
        append(store, torch.randn(1, 2, 2, 4), torch.randn(1, 2, 2, 4))


def test_room_grows_by_many_tokens_and_keeps_every_entry():
    store = random_store([400, 100], d=4, room=3)
    assert store.with_room(3) is store
    grown = store.with_room(4)
    assert grown.room == 64
    for old, new in zip(segments(store), segments(grown), strict=True):
        assert all(torch.equal(a, b) for a, b in zip(old, new, strict=True))
    assert store.with_room(1000).room == 1000
    assert random_store([1000, 200], d=4, room=0).with_room(1).room == 150


def test_growth_is_bounded_whatever_the_context():
    """Scenario S39: a few hundred places a head, and an amortised copy of a hundredth of the store a token."""
    store, step = random_store([40_000, 20_000], d=4, room=32), torch.randn(1, 2, 1, 4)
    before, allocated, tokens = store.nbytes, 0, 1000
    for _ in range(tokens):
        grown = store.with_room(1)
        allocated += grown.nbytes if grown is not store else 0
        store = grown
        append(store, step, step)
        assert store.room <= 256
    place = (4 + 4) * 4 + 4
    assert store.nbytes - before <= 2 * (tokens + 256) * place
    assert allocated / tokens < 0.01 * store.nbytes


def test_decoding_allocates_a_few_tokens_worth_per_step():
    """Scenario S24: 256 steps, amortised; nothing of the cache's size is copied per step."""
    store = random_store([1024, 1024], d=16, room=32)
    step, entry = torch.randn(1, 2, 1, 16), 2 * (16 + 16) * 4 + 2 * 4
    allocated = 0
    for _ in range(256):
        grown = store.with_room(1)
        if grown is not store:
            allocated += grown.nbytes
        store = grown
        append(store, step, step)
    assert allocated / 256 < 12 * entry
    assert store.length.tolist() == [1280, 1280]


def test_select_rows_repeats_and_reorders():
    store = random_store([3, 1, 4, 2, 0, 5], batch=3, d=4)
    chosen = store.select_rows([2, 0, 2])
    assert chosen.batch == 3
    for to, row in enumerate([2, 0, 2]):
        for head in range(2):
            want, got = store.segment(row, head), chosen.segment(to, head)
            assert all(torch.equal(a, b) for a, b in zip(want, got, strict=True))
    chosen.keys.zero_()
    assert (store.segment(0, 0)[0] != 0).all()


def test_rows_are_selected_after_growth_and_cropping():
    """Places of rows that the host remembers stay those of the device; a store that it did not make is asked once."""
    store = random_store([3, 9, 4, 2], batch=2, d=4, room=1)
    store = store.with_room(5)
    append(store, torch.randn(2, 2, 3, 4), torch.randn(2, 2, 3, 4))
    store.truncate(1)
    strange = RaggedKV(store.keys, store.values, store.log_w, store.start, store.length, store.batch, store.room)
    for it in (store, strange):
        chosen = it.select_rows([1, 1, 0]).select_rows([2, 0])
        chosen = chosen.with_room(chosen.room + 1).select_rows([1, 0])
        for to, row in enumerate([1, 0]):
            for head in range(2):
                want, got = store.segment(row, head), chosen.segment(to, head)
                assert all(torch.equal(a, b) for a, b in zip(want, got, strict=True))
        append(chosen, torch.ones(2, 2, 1, 4), torch.ones(2, 2, 1, 4))
        assert (chosen.segment(1, 1)[0][-1] == 1).all()


def test_lengths_that_are_known_need_not_be_read():
    kept = torch.rand(2, 3, 50) < 0.3
    keys, log_w = torch.randn(2, 3, 50, 4), torch.randn(2, 3, 50)
    read = RaggedKV.pack(keys, keys, kept, log_w)
    told = RaggedKV.pack(keys, keys, kept, log_w, lengths=kept.sum(-1).flatten().tolist())
    for a, b in zip(segments(read), segments(told), strict=True):
        assert all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def test_pack_of_views():
    """Dense tensors may be slices, transposed, or expanded, as a prefill's are after copies of batch rows."""
    keys = torch.randn(1, 3, 40, 8)[:, :, 5:, ::2].expand(2, -1, -1, -1)
    values = torch.randn(2, 35, 3, 6).transpose(1, 2)
    kept = torch.rand(2, 3, 35) < 0.5
    store = RaggedKV.pack(keys, values, kept, torch.zeros(2, 3, 35))
    for row in range(2):
        for head in range(3):
            k, v, _ = store.segment(row, head)
            assert torch.equal(k, keys[row, head, kept[row, head]])
            assert torch.equal(v, values[row, head, kept[row, head]])


def test_truncate_gives_the_room_back():
    store = random_store([5, 6], d=4, room=3)
    want = store.segment(0, 1)[0].clone()
    append(store, torch.randn(1, 2, 2, 4), torch.randn(1, 2, 2, 4))
    store.truncate(2)
    assert (store.room, store.length.tolist()) == (3, [5, 6])
    assert torch.equal(store.segment(0, 1)[0], want)


def test_packed_inside_inference_mode_appended_outside():
    with torch.inference_mode():
        keys = torch.randn(1, 1, 4, 2)
        store = RaggedKV.pack(keys, keys, torch.ones(1, 1, 4, dtype=torch.bool), torch.zeros(1, 1, 4))
    append(store, torch.randn(1, 1, 1, 2), torch.randn(1, 1, 1, 2))
    assert store.length.tolist() == [5]
