"""The states of the random number generators of this process, as tensors and plain values."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch


def random_states() -> dict[str, Any]:
    """Those of Python, NumPy, torch on the CPU, and of this rank's CUDA device if it is in use."""
    version, numbers, gauss = random.getstate()
    legacy: dict[str, Any] = np.random.get_state(legacy=False)
    legacy = legacy | {"state": {**legacy["state"], "key": legacy["state"]["key"].tolist()}}
    cuda = torch.cuda.get_rng_state() if torch.cuda.is_available() and torch.cuda.is_initialized() else None
    return {"python": [version, list(numbers), gauss], "numpy": legacy, "cpu": torch.get_rng_state(), "cuda": cuda}


def set_random_states(states: dict[str, Any]) -> None:
    """Go on from what :func:`random_states` has returned."""
    version, numbers, gauss = states["python"]
    random.setstate((version, tuple(numbers), gauss))
    legacy = states["numpy"]
    key = np.array(legacy["state"]["key"], dtype=np.uint32)
    np.random.set_state(legacy | {"state": {**legacy["state"], "key": key}})
    torch.set_rng_state(states["cpu"])
    if states["cuda"] is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(states["cuda"])
