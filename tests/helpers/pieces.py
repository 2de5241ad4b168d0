"""Split the inputs of a mixer's call into pieces, and compare outputs."""

from __future__ import annotations

from dataclasses import replace

import torch


def slice_inputs(inputs, start, stop):
    """Return tokens start .. stop of MixerInputs."""
    parts = {n: getattr(inputs, n)[:, :, start:stop] for n in ("q_BHTK", "k_BGTK", "v_BGTV")}
    valid = None if inputs.valid_BT is None else inputs.valid_BT[:, start:stop]
    return replace(inputs, **parts, x_BTD=inputs.x_BTD[:, start:stop], valid_BT=valid, mask_BHTS=None)


def relative_error(got, wanted, valid=None):
    """Return |got - wanted| / |wanted|, over valid tokens if a mask is given."""
    if valid is not None:
        got, wanted = (x.transpose(1, 2)[valid] for x in (got, wanted))
    return ((got - wanted).norm() / wanted.norm()).item()


def run_in_pieces(mixer, inputs, lengths):
    """Mix the tokens in consecutive pieces of these lengths; return (output, final state)."""
    state, outs, start = mixer.empty_state(inputs.q_BHTK.shape[0], "cpu"), [], 0
    for length in lengths:
        out, state = mixer.mix(slice_inputs(inputs, start, start + length), state)
        outs.append(out)
        start += length
    return torch.cat(outs, 2), state
