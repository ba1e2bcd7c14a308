"""A state machine that drives a compressed cache and, beside it, a dense cache with the oracle's attention.

Every logit of a token that is not padding is compared after every step. ``python -m tests.helpers.machine MINUTES``
(``make fuzz``) runs random sequences for as long as asked and prints how many; a failure prints the shortest sequence
that shows it, to be kept as a plain test.
"""

import argparse
import copy
import math
import tempfile
import time
import warnings
from contextlib import nullcontext

import pytest
import torch
import transformers
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test
from kvpress import KnormPress, ScorerPress
from torch import Tensor
from transformers import DynamicCache

from kvpress_prob import (
    AttentionPress,
    CacheBudget,
    Component,
    H2OPress,
    Lookahead,
    MinVariancePress,
    ProbabilisticPress,
    Reconstruction,
    load_compressed,
    save_compressed,
)
from kvpress_prob.hf import RaggedLayer
from tests.helpers.models import ARCHITECTURES, tokens
from tests.helpers.oracle import biases_of, oracle_attention

# Gemma's configurations warn about their own rope settings.
transformers.utils.logging.get_logger("transformers.modeling_rope_utils").setLevel("ERROR")

FAMILIES = ("Llama", "Qwen3", "Gemma 2", "Gemma 3", "SmolLM3", "OLMo 2", "GLM-4", "Phi-3", "DeepSeek-V3", "Granite")
KINDS = [(family, attn) for attn in ("eager", "sdpa") for family in FAMILIES]
RECONSTRUCTION = AttentionPress(source=Reconstruction(chunk_size=17), statistic="max")
SCORERS = (
    MinVariancePress(),
    H2OPress(),
    RECONSTRUCTION,
    AttentionPress(source=Lookahead(2, 3), statistic="output_change"),
    [Component(RECONSTRUCTION, 0.6, budget_weighting="score"), Component(MinVariancePress())],
)
DTYPES = (torch.int64, torch.int32, torch.uint8, torch.bool, torch.float16, torch.bfloat16, torch.float64)
BUDGETS = (
    CacheBudget(24, interval=4, queries=3, start="decoding"),
    CacheBudget(80, interval=64, queries=2, start="decoding"),
)
BOUNDED = (CacheBudget(24, interval=4, queries=3), CacheBudget(80, interval=16, queries=2), CacheBudget(interval=8))
BOUNDED_SCORERS = (
    MinVariancePress(),
    H2OPress(),
    KnormPress(),
    [Component(KnormPress(), 0.4), Component(MinVariancePress())],
)
LARGEST_BATCH = 6


class OddScorer(ScorerPress):
    """Scores of unusual kinds, dtypes and layouts, all of the shape that is asked for."""

    def __init__(self, kind: str, dtype: torch.dtype, layout: str):
        super().__init__()
        self.kind, self.dtype, self.layout = kind, dtype, layout

    def __repr__(self) -> str:
        return f"OddScorer({self.kind!r}, {self.dtype}, {self.layout!r})"

    def score(self, module, hidden_states, keys, values, attentions, kwargs):
        norm = keys.norm(dim=-1)
        place = torch.arange(keys.shape[2]).expand(norm.shape)
        scores = {
            "norms": norm,
            "minus norms": -norm,
            "signed": keys[..., 0],
            "rounding": norm - norm.amin(-1, keepdim=True) - 1e-7,
            "ranks": place,
            "counts": (norm * 100).long() % 8,
            "one-hot": (place == 3) * 1,
            "zeros": place * 0,
            "marks": torch.where(place < 2, norm.max() + 1, norm / (norm.max() + 1)),
            "largest": torch.where(place < 2, torch.finfo(norm.dtype).max, norm),
        }[self.kind]
        if self.kind != "largest":
            scores = scores.to(self.dtype)
        if self.layout == "strided":
            return torch.stack((scores, scores), -1)[..., 0]
        if self.layout == "transposed":
            return scores.mT.contiguous().mT
        return scores


class WrongScorer(ScorerPress):
    """Scores of another shape than is asked for."""

    def __init__(self, shape: str):
        super().__init__()
        self.shape = shape

    def score(self, module, hidden_states, keys, values, attentions, kwargs):
        norm = keys.norm(dim=-1)
        wrong = {"too short": norm[..., 1:], "one head": norm[0, 0], "flat": norm.flatten(), "another batch": norm[:0]}
        return wrong[self.shape]


ODD_KINDS = ("norms", "minus norms", "signed", "rounding", "ranks", "counts", "one-hot", "zeros", "marks", "largest")


@st.composite
def odd_scorers(draw) -> OddScorer:
    layouts = st.sampled_from(["plain", "strided", "transposed"])
    return OddScorer(draw(st.sampled_from(ODD_KINDS)), draw(st.sampled_from(DTYPES)), draw(layouts))


@st.composite
def shapes(draw) -> dict:
    """Sizes of a model; latent attention has one KV head a query head and widths of its own."""
    (name, attn), layers = draw(st.sampled_from(KINDS)), draw(st.integers(1, 3))
    kv_heads, group = draw(st.integers(1, 3)), draw(st.sampled_from([1, 2, 3, 4]))
    sizes = {"num_hidden_layers": layers}
    if "layer_types" in ARCHITECTURES[name].settings:
        kinds = st.sampled_from(["sliding_attention", "full_attention"])
        sizes["layer_types"] = [*(draw(kinds) for _ in range(layers - 1)), "full_attention"]
        sizes["sliding_window"] = draw(st.sampled_from([4, 16]))
    if name == "SmolLM3":
        sizes["no_rope_layers"] = [draw(st.integers(0, 1)) for _ in range(layers)]
    if name == "DeepSeek-V3":
        sizes |= {"num_attention_heads": kv_heads, "num_key_value_heads": kv_heads}
    else:
        head_dim = draw(st.sampled_from([8, 16, 48]))
        sizes |= {"num_attention_heads": kv_heads * group, "num_key_value_heads": kv_heads, "head_dim": head_dim}
        sizes["hidden_size"] = hidden = kv_heads * group * head_dim  # where some models take the width from
        sizes["initializer_range"] = 1.6 / hidden**0.5  # attention as sharp as at the tests' usual sizes
    return {"name": name, "attn": attn, "seed": draw(st.integers(0, 99)), **sizes}


@st.composite
def presses(draw) -> ProbabilisticPress:
    sampler = draw(st.sampled_from(["systematic", "multinomial", "top_k"]))
    corrections = ["none"] + {"systematic": ["inclusion"], "multinomial": ["inclusion", "counts"], "top_k": []}[sampler]
    scorers = [it for it in SCORERS if sampler != "top_k" or not isinstance(it, list) or len(it) == 1]
    odd = draw(st.integers(0, 2)) == 0
    scorer = draw(odd_scorers()) if odd else copy.deepcopy(draw(st.sampled_from(scorers)))
    several = isinstance(scorer, list)
    return ProbabilisticPress(
        scorer,
        draw(st.sampled_from([0.0, 0.2, 0.5, 0.9, 0.99])),
        sampler=sampler,
        correction=draw(st.sampled_from(corrections)),
        temperature=draw(st.sampled_from([1.0, 2.0])),
        allocation=draw(st.sampled_from(["global", "layer", "head"])),
        budget_weighting="uniform" if several or odd else draw(st.sampled_from(["uniform", "score"])),
        proposal_temperature=1.0 if several else draw(st.sampled_from([1.0, 0.001, 3.0])),
        uniform_mix=draw(st.sampled_from([0.0, 0.1])),
        budget=draw(st.sampled_from([None, None, *BUDGETS])),
        max_weight=draw(st.sampled_from([math.inf, 3.0])),
        n_sink=draw(st.integers(0, 3)),
        n_recent=draw(st.integers(0, 3)),
        seed=draw(st.integers(0, 99)),
    )


@st.composite
def bounded_presses(draw) -> ProbabilisticPress:
    """Presses whose budget holds from the first token on."""
    scorer, budget = copy.deepcopy(draw(st.sampled_from(BOUNDED_SCORERS))), draw(st.sampled_from(BOUNDED))
    draws = isinstance(scorer, list) or draw(st.booleans())
    ratios = [0.5, 0.9] if budget.max_entries is None else [0.0, 0.5]
    return ProbabilisticPress(
        scorer,
        draw(st.sampled_from(ratios)),
        sampler="systematic" if draws else "top_k",
        correction=draw(st.sampled_from(["inclusion", "none"])) if draws else "none",
        allocation=draw(st.sampled_from(["global", "layer", "head"])),
        budget=budget,
        max_weight=draw(st.sampled_from([math.inf, 3.0])),
        n_sink=draw(st.integers(0, 3)),
        n_recent=draw(st.integers(0, 3)),
        seed=draw(st.integers(0, 99)),
    )


class CompressedCacheMachine(RuleBasedStateMachine):
    """Random lives of a compressed cache."""

    sequences = 0

    def __init__(self):
        super().__init__()
        type(self).sequences += 1
        self.steps = 0

    @initialize(
        shape=shapes(),
        press=st.one_of(presses(), presses(), bounded_presses()),
        length=st.integers(1, 60),
        padding=st.lists(st.integers(0, 59), max_size=2),
        sliding_cache=st.booleans(),
        inference=st.booleans(),
        before=st.sampled_from([0, 0, 0, 1, 7]),
        chunks=st.lists(st.integers(1, 20), max_size=2),
    )
    def prefill(self, shape, press, length, padding, sliding_cache, inference, before, chunks):
        """A context in one piece or in chunks, on an empty cache or on a prefix that was cached before the block."""
        name = shape.pop("name")
        self.model = ARCHITECTURES[name].build(shape.pop("attn"), shape.pop("seed"), **shape)
        self.budget = press.budget is not None
        self.bounding = press if press.budget is not None and press.budget.start == "prefill" else None
        before %= length
        rows = [0, *(0 if before else pad % length for pad in padding)]
        self.mask = (torch.arange(length) >= torch.tensor(rows).unsqueeze(-1)).long()
        config = self.model.config if sliding_cache else None
        self.cache, self.full = DynamicCache(config=config), DynamicCache(config=config)
        self.croppable = not sliding_cache or "sliding_attention" not in (getattr(config, "layer_types", None) or ())
        ids, self.biases = tokens(length, batch=len(rows)), {}
        with torch.inference_mode(inference), torch.no_grad(), warnings.catch_warnings():
            # A ratio that cannot be reached, and what does not enter the cache as one prefill, warn.
            warnings.simplefilter("ignore", UserWarning)
            for cache in (self.cache, self.full) if before else ():
                self.model(ids[:, :before], past_key_values=cache)
            inputs = {"attention_mask": self.mask, "position_ids": self.positions()[:, before:]}
            self.model(ids[:, before:], past_key_values=self.full, **inputs)
            with press(self.model):
                self.model(ids[:, before:], past_key_values=self.cache, **inputs)
            self.biases = biases_of(self.cache, self.full)
            self.length = length
            for n in chunks:
                self.forward(n, [0] * self.batch, False, press)

    def positions(self) -> Tensor:
        return (self.mask.cumsum(-1) - 1).clamp(min=0)

    @property
    def ragged(self) -> dict[int, RaggedLayer]:
        return {index: layer for index, layer in enumerate(self.cache.layers) if isinstance(layer, RaggedLayer)}

    @property
    def batch(self) -> int:
        return len(self.mask)

    def forward(self, n: int, hidden: list[int], always_mask: bool, press: ProbabilisticPress | None = None) -> None:
        """``n`` new tokens a row, of which the first ``hidden[row]`` are padding, inside a press' block or outside any;
        compares the logits."""
        self.steps += 1
        ids = tokens(n, batch=self.batch, seed=self.steps)
        new = (torch.arange(n) >= torch.tensor(hidden).unsqueeze(-1)).long()
        self.mask = torch.cat([self.mask, new], 1)
        inputs = {"position_ids": self.positions()[:, -n:]}
        if always_mask or not self.mask.all():
            inputs["attention_mask"] = self.mask
        with torch.no_grad():
            with nullcontext() if press is None else press(self.model):
                got = self.model(ids, past_key_values=self.cache, **inputs).logits
            with oracle_attention(self.model, self.biases):
                want = self.model(ids, past_key_values=self.full, **inputs).logits
        seen = new.bool()
        torch.testing.assert_close(got[seen], want[seen], atol=1e-4 * max(1.0, float(want[seen].abs().max())), rtol=0)
        assert self.cache.get_seq_length() == self.full.get_seq_length() == self.mask.shape[1]
        if self.budget and self.ragged:
            # Layers may have been sampled again after they had attended.
            self.biases = biases_of(self.cache, self.full, atol=1e-3)
            self.length = max(layer.context_length for layer in self.ragged.values())

    @rule(n=st.integers(1, 9), data=st.data(), always_mask=st.booleans())
    def question(self, n, data, always_mask):
        most = 0 if self.budget else n - 1  # a budget knows of no hidden tokens
        hidden = data.draw(st.lists(st.integers(0, most), min_size=self.batch, max_size=self.batch))
        self.forward(n, hidden, always_mask)

    @rule(n=st.sampled_from([1, 1, 2, 33, 70]))
    def append(self, n):
        self.forward(n, [0] * self.batch, False)

    @precondition(lambda self: self.bounding is not None)
    @rule(n=st.sampled_from([1, 5, 40, 120]))
    def more_context(self, n):
        """A later pass inside a block of the press that bounds the cache."""
        self.forward(n, [0] * self.batch, False, self.bounding)

    @precondition(lambda self: self.croppable)
    @rule(data=st.data(), negative=st.booleans())
    def crop(self, data, negative):
        # Not all tokens: transformers' own layers do not change their batch while they are empty.
        drop = data.draw(st.integers(0, self.mask.shape[1] - max(self.length, 1)))
        for cache in (self.cache, self.full):
            cache.crop(-drop if negative and drop else self.mask.shape[1] - drop)
        self.mask = self.mask[:, : self.mask.shape[1] - drop]

    def reindex(self, rows: Tensor) -> None:
        self.mask = self.mask[rows]
        self.biases = {layer: bias[rows] for layer, bias in self.biases.items()}

    @rule(data=st.data())
    def reorder(self, data):
        rows = torch.tensor(
            data.draw(st.lists(st.integers(0, self.batch - 1), min_size=self.batch, max_size=self.batch))
        )
        for cache in (self.cache, self.full):
            cache.reorder_cache(rows)
        self.reindex(rows)

    @precondition(lambda self: 2 * self.batch <= LARGEST_BATCH)
    @rule()
    def repeat(self):
        for cache in (self.cache, self.full):
            cache.batch_repeat_interleave(2)
        self.reindex(torch.arange(self.batch).repeat_interleave(2))

    @rule(data=st.data())
    def select(self, data):
        rows = torch.tensor(data.draw(st.lists(st.integers(0, self.batch - 1), min_size=1, max_size=self.batch)))
        for cache in (self.cache, self.full):
            cache.batch_select_indices(rows)
        self.reindex(rows)

    @precondition(lambda self: any(isinstance(layer, RaggedLayer) for layer in self.cache.layers))
    @rule(more=st.integers(0, 1))
    def fill(self, more):
        """Append until no room is left behind the segments, or one token more."""
        room = next(layer.store.room for layer in self.cache.layers if isinstance(layer, RaggedLayer))
        self.forward(max(room + more, 1), [0] * self.batch, False)

    @rule(inference=st.booleans())
    def copy(self, inference):
        """Two copies live the same life, one of them while the original goes on."""
        with torch.inference_mode(inference):
            first, second = copy.deepcopy(self.cache), copy.deepcopy(self.cache)
        mask = torch.nn.functional.pad(self.mask, (0, 1), value=1)
        step = {"input_ids": tokens(1, batch=self.batch), "attention_mask": mask}
        again = {
            "input_ids": tokens(1, batch=self.batch),
            "attention_mask": torch.nn.functional.pad(mask, (0, 1), value=1),
        }
        with torch.no_grad():
            self.model(**step, past_key_values=first)
            self.forward(1, [0] * self.batch, True)
            got = self.model(**again, past_key_values=first).logits
            self.model(**step, past_key_values=second)
            assert torch.equal(got, self.model(**again, past_key_values=second).logits)

    @rule(inference=st.booleans())
    def save_and_load(self, inference):
        with tempfile.TemporaryDirectory() as folder, torch.inference_mode(inference):
            save_compressed(self.cache, f"{folder}/cache")
            self.cache = load_compressed(f"{folder}/cache")

    @rule(n=st.sampled_from([1, 1, 5, 40]))
    def inference_mode(self, n):
        with torch.inference_mode():
            self.forward(n, [0] * self.batch, False)

    @rule(n=st.integers(1, 5))
    def autocast(self, n):
        """Copies of both caches read a few tokens in bfloat16; they are compared as well as that allows."""
        cache, full = copy.deepcopy(self.cache), copy.deepcopy(self.full)
        ids, mask = tokens(n, batch=self.batch), torch.nn.functional.pad(self.mask, (0, n), value=1)
        inputs = {"attention_mask": mask, "position_ids": (mask.cumsum(-1) - 1).clamp(min=0)[:, -n:]}
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
            got = self.model(ids, past_key_values=cache, **inputs).logits.float()
            with oracle_attention(self.model, self.biases):
                want = self.model(ids, past_key_values=full, **inputs).logits.float()
        assert (got - want).abs().mean() < 0.05 * want.abs().max()

    @rule(shape=st.sampled_from(["too short", "one head", "flat", "another batch"]))
    def refused_scores(self, shape):
        """A prefill whose scores have a wrong shape raises and touches nothing that this life depends on."""
        press = ProbabilisticPress(WrongScorer(shape), 0.5)
        refusal = pytest.raises(ValueError, match="scores of WrongScorer must be real numbers of shape")
        with torch.no_grad(), press(self.model), refusal:
            self.model(tokens(9), past_key_values=DynamicCache())


def main() -> None:
    parser = argparse.ArgumentParser(description="Fuzz a compressed cache against the oracle.")
    parser.add_argument("minutes", type=float)
    minutes = parser.parse_args().minutes
    torch.set_num_threads(1)
    end = time.monotonic() + 60 * minutes
    # Small rounds, so that the time is kept; without a database, so that every round is new.
    rounds = settings(max_examples=20, stateful_step_count=15, deadline=None, derandomize=False, database=None)
    while time.monotonic() < end:
        run_state_machine_as_test(CompressedCacheMachine, settings=rounds)
        print(f"{CompressedCacheMachine.sequences} sequences, none failed")


if __name__ == "__main__":
    main()
