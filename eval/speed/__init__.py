"""`surgery bench`: ours, the reference, torch's own and others' kernels, side by side in one process."""
