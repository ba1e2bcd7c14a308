"""A long life in short: the soak (``make soak``) at a size for every run, threads, interrupts while decoding."""

import threading

import pytest
import torch

from kvpress_prob.ragged import RaggedKV
from tests.helpers import soak
from tests.helpers.compare import compress, press_of
from tests.helpers.models import tiny_llama, tokens


def test_nothing_outlives_its_context():
    early, late = soak.contexts(tiny_llama(), 40, longest=200)
    assert late.tensors == early.tensors
    assert late.objects - early.objects < 50
    assert late.resident < 1.05 * early.resident


def test_a_long_generation_keeps_nothing_but_its_cache():
    early, late, _ = soak.decoding(tiny_llama(), 300)
    assert late.tensors == early.tensors
    assert late.objects - early.objects < 50
    assert late.resident - late.cache < 1.05 * (early.resident - early.cache)


def test_two_threads_decode_two_caches_on_one_model():
    model, barrier = tiny_llama(), threading.Barrier(2)
    contexts = (60, 90)
    caches = [compress(model, tokens(length), press_of()) for length in contexts]
    results = [[], []]

    def decode(index: int) -> None:
        barrier.wait()
        with torch.no_grad():
            for step in range(60):
                results[index].append(model(tokens(1, seed=step), past_key_values=caches[index]).logits)

    threads = [threading.Thread(target=decode, args=(index,)) for index in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for index, length in enumerate(contexts):
        alone = compress(model, tokens(length), press_of())
        for step in range(60):
            assert torch.equal(results[index][step], model(tokens(1, seed=step), past_key_values=alone).logits)


ERRORS = (RuntimeError("injected"), KeyboardInterrupt(), torch.OutOfMemoryError("injected"))
STAGES = (
    (RaggedKV, "with_room"),
    (torch.Tensor, "new_empty"),
    ("kvpress_prob.hf.cache.append", None),
    ("kvpress_prob.hf.cache.weighted_decode", None),
)


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
@pytest.mark.parametrize(("owner", "name"), STAGES, ids=["room", "allocation", "append", "attention"])
def test_an_interrupt_while_decoding_leaves_the_model_and_other_caches_as_they_were(monkeypatch, owner, name, error):
    model = tiny_llama()
    broken, other, same = (compress(model, tokens(60), press_of()) for _ in range(3))
    plain = model(tokens(30)).logits

    def boom(*args, **kwargs):
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(*((owner, name, boom) if name else (owner, boom)))
        with pytest.raises(type(error)):
            model(tokens(40), past_key_values=broken)
    assert torch.equal(model(tokens(30)).logits, plain)
    for step in range(3):
        want = model(tokens(1, seed=step), past_key_values=same).logits
        assert torch.equal(model(tokens(1, seed=step), past_key_values=other).logits, want)
