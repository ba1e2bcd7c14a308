"""Query sources: where the query rows come from whose attention a proposal is a statistic of.

A proposal is a statistic over query rows (``mean``, ``max`` or leave-one-out output change), and which rows is
a choice of its own. Rows of the prefill read a text; they do not ask about it. Rows of a reconstruction do, and so do
sampled continuations.

    PrefillRows        the prefill's own queries, weighted by a prior               the paper; H2O, SnapKV, TOVA
    ExpectedQueries    a Gaussian over coming queries, in closed form               ExpectedAttention
    Reconstruction     the model repeats the context, on its own cache              KVzip
    Lookahead          short continuations that the model samples                   LORE-KV

Every source yields ``QueryRows``: a block of rows of one layer with row weights and the entries that they see. The
first two read a layer while the prefill runs; the last two make a second pass over the finished prefill, which leaves
no trace in the cache. Presses, budget and cache do not know which one is in use.

A ``Surrogate`` has no rows: it predicts what rows would say of an entry from the hidden state of its token.
"""

from kvpress_prob.sources.expected import ExpectedQueries
from kvpress_prob.sources.lookahead import Lookahead
from kvpress_prob.sources.prefill_rows import PrefillRows
from kvpress_prob.sources.query_rows import LayerSource, PassSource, QueryRows
from kvpress_prob.sources.reconstruction import Reconstruction, kvzip_prompt
from kvpress_prob.sources.surrogate import (
    OUTPUTS,
    Output,
    Surrogate,
    SurrogateHeader,
    find_surrogate,
    load_surrogate,
    save_surrogate,
    surrogate_path,
)

__all__ = [
    "OUTPUTS",
    "ExpectedQueries",
    "LayerSource",
    "Lookahead",
    "Output",
    "PassSource",
    "PrefillRows",
    "QueryRows",
    "Reconstruction",
    "Surrogate",
    "SurrogateHeader",
    "find_surrogate",
    "kvzip_prompt",
    "load_surrogate",
    "save_surrogate",
    "surrogate_path",
]
