"""Routed experts as clients get them: an array in NumPy's `.npy` format, base64."""

from __future__ import annotations

import base64
import io

import numpy as np

from rollout.outputs import RoutingShape


def routed_experts_npy(rows: bytes, shape: RoutingShape) -> str:
    """Base64 of an `.npy` file: (tokens, layers, experts per token), uint8 or uint16, from the rows of TokenOutputs.

    Joined in order, the rows of a choice's first n tokens make the array of prompt + n - 1 tokens.
    """
    array = np.frombuffer(rows, shape.dtype).reshape(-1, shape.num_layers, shape.num_experts_per_tok)
    file = io.BytesIO()
    np.save(file, array, allow_pickle=False)
    return base64.b64encode(file.getvalue()).decode()
