"""Foundations without models: errors, configs, registries, dispatch to kernels, files and journals, processes, devices, progress."""
