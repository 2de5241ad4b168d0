"""Sample continuations of prompts from a causal language model: calibration rows and training text that the original
writes itself.

The tokens are a function of the model, the prompts and the seed on one kind of device, so that an interrupted job
samples the same ones again.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


@torch.no_grad()
def sample_continuations(
    model: Any,
    prompts_NP: Tensor,
    new: int,
    seed: int,
    *,
    temperature: float = 1.0,
    mask_NP: Tensor | None = None,
    stops: Sequence[int] = (),
    static: bool = False,
) -> Tensor:
    """Return the prompts with up to `new` sampled tokens each, (N, P + new), on the CPU.

    The checkpoint's own settings of generation have no effect: tokens are drawn from the whole distribution.

    mask_NP: 0 at padding, which is on the left; None: there is none. stops: token ids that end a row, which is padded
    with 0 then; none: every row has `new` tokens and goes on with the next document, as windows of text do. static:
    keep keys and values in a cache of fixed size, for which transformers compiles the step on a GPU.
    """
    from transformers import GenerationConfig

    device, before = next(model.parameters()).device, model.generation_config
    settings: Any = GenerationConfig
    model.generation_config = settings(
        do_sample=True,
        temperature=temperature,
        top_k=0,
        top_p=1.0,
        max_new_tokens=new,
        min_new_tokens=None if stops else new,
        eos_token_id=list(stops) or None,
        pad_token_id=0,
        **({"cache_implementation": "static"} if static else {}),
    )
    ids_NP = prompts_NP.to(device)
    mask = torch.ones_like(ids_NP) if mask_NP is None else mask_NP.to(device)
    try:
        with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
            torch.manual_seed(seed % 2**63)
            sampled: Tensor = model.generate(ids_NP, attention_mask=mask)
    finally:
        model.generation_config = before
    return sampled.cpu()
