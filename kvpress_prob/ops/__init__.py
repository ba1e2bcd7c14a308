"""Floor 2: operations. One folder each: ``api.py`` validates and dispatches, ``reference.py`` is the specification in
plain torch.

``impl="auto"`` follows the rule in the operation's docstring; an explicit choice that cannot run raises.
"""

from kvpress_prob.ops.append import append
from kvpress_prob.ops.attention_mass import attention_mass
from kvpress_prob.ops.weighted_decode import weighted_decode

__all__ = ["append", "attention_mass", "weighted_decode"]
