"""Estimates of a conversion before it runs: time, peak memory, disk and the size of the result, from the config
alone.
"""
