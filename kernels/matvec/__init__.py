"""A few vectors times a matrix: `kernel.py`, and its tiles in `plan.py`.

Low-rank linears (`kernels/low_rank/`) and BTT (`kernels/btt/decode.py`) launch two of them for a decoding step.
"""
