"""Floor 2: operations. One folder each: ``api.py`` validates and dispatches, ``reference.py`` is the specification in
plain torch, ``launch.py`` says how the kernels of ``triton_kernel.py`` are launched.

``impl="auto"`` follows the rule in the operation's docstring and in ``availability``; an explicit choice that cannot
run raises. Every operation is a torch operator (``library``), so compiled models call it without a graph break.
An operation is imported from its folder: ``from kvpress_prob.ops.append import append``.
"""
