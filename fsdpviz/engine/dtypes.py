"""The experiment's element types as torch has them."""

from __future__ import annotations

import torch

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def torch_dtype(name: str | None) -> torch.dtype | None:
    return None if name is None else _DTYPES[name]
