"""Floor 0: proposals, budget, sampling and importance weights as pure functions on tensors.

The estimator (arXiv 2608.28293, section 5). A KV head holds entries ``(k_i, v_i)``, ``i = 1..t``. Attention of a later
query is an expectation ``o = sum_i p(i) v_i``; eviction keeps a random subset and estimates ``o`` from it::

    proposal        pi, a distribution over 1..t                              proposals.py
    budget          how many draws leave (1 - r) t distinct entries           budget.py
    draw            counts c ~ Multinomial(m, pi), or a systematic sample     sampling.py
    several         the union of draws from several proposals                 budget.py
    weights         w_i = c_i / (m pi_i), or 1 / P(i kept)                    importance.py
    all of it       one call for all heads of a model                         draw.py

Decode-time attention over kept entries adds ``log w_i`` to the logits; that bias is the whole contract with the rest of
the package.

Conventions: ``h`` heads (layers times KV heads), ``t`` entries, ``b`` batch rows, ``hq`` query heads, ``hkv`` KV heads,
``n`` query rows, ``d`` and ``dv`` the widths of keys and values. Probabilities are float64 from the budget onwards;
logarithms are natural. Randomness is a ``torch.Generator`` argument and lives on the CPU; the deterministic cores take
explicit uniforms.
"""
