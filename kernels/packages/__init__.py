"""Kernels of other packages for gated masks in chunks: the gated delta rule and SSD, where they are faster than ours.

`adapters.py` calls flash-qla, fla-core and flashinfer, if installed; `heads_last.py` lays tensors out for them;
`contest.py` imports, checks, times and chooses; `chunked.py` puts the choice into an op.
"""
