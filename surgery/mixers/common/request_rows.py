"""The pages and lengths of a server's requests in buffers of a fixed address, which the kernels of a step read.

R requests of a step, S entries of a buffer, P pages of a request.
"""

from __future__ import annotations

import torch
from torch import Tensor

from surgery.core.dispatch import dispatched

NO_TOKEN = -1  # tokens that a row without a request has seen


@dispatched
def write_request_rows(
    length_R: Tensor, start_R: Tensor, page_RP: Tensor, rows_S: Tensor, seen_S: Tensor, *, block: int, no_page: int
) -> None:
    """Write each request's page to rows_S, and its tokens before the step to seen_S, both int32.

    length_R: tokens of each request, those of the step included; 0 for padding, which gets `no_page` and NO_TOKEN, as do
    the entries behind the requests. start_R: R + 1 borders of the requests among the tokens of the step. page_RP: a
    request's page in its first column, or, with block > 0, in the column of the last token's block of so many tokens.
    """
    count, is_real_R = len(length_R), length_R > 0
    column_R = (length_R - 1).clamp_min(0) // block if block else torch.zeros_like(length_R)
    page_R = page_RP[:count].gather(1, column_R.long().unsqueeze(1)).squeeze(1)
    rows_S[count:].fill_(no_page)
    seen_S[count:].fill_(NO_TOKEN)
    rows_S[:count].copy_(torch.where(is_real_R, page_R, no_page))
    seen_S[:count].copy_(torch.where(is_real_R, length_R - start_R[: count + 1].diff(), NO_TOKEN))
