"""Speculative decoding: a drafter proposes tokens, the original model verifies them in one forward."""
