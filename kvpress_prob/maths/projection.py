"""Distances behind an attention layer's output projection.

With ``W_h`` the columns of the projection that head ``h``'s output ``x`` meets, ``|W_h x| = |x L_h|`` for any factor
``L_h L_h' = W_h' W_h``. A factor is as wide as a head, the layer is much wider: distances between values and outputs
are measured behind the projection at the cost of distances before it. The factor is by eigenvalues, since ``W_h`` may
lack full column rank.
"""

import torch
from jaxtyping import Float
from torch import Tensor


def projection_factors(weight: Float[Tensor, "hidden hqdv"], width: int) -> Float[Tensor, "hq dv dv"]:
    """``L_h`` of every head.

    Parameters
    ----------
    weight : Float[Tensor, "hidden hqdv"]
        Weight of the output projection; head ``h`` has the ``dv`` columns from ``h dv`` on.
    width : int
        ``dv``, of a head's values.

    Returns
    -------
    Float[Tensor, "hq dv dv"]
        float64.

    Raises
    ------
    ValueError
        If the columns are not a multiple of the width.
    """
    if weight.shape[1] % width:
        raise ValueError(f"weight must have a multiple of {width} columns, got {weight.shape[1]}")
    by_head = weight.double().unflatten(1, (-1, width)).transpose(0, 1)  # [hq hidden dv]
    eigenvalues, vectors = torch.linalg.eigh(by_head.mT @ by_head)
    return vectors * eigenvalues.clamp(min=0).sqrt().unsqueeze(-2)
