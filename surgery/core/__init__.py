"""Foundations without model knowledge: errors, configs, registries, kernel dispatch, files, journals, processes,
devices, progress.
"""
