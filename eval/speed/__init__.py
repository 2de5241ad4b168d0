"""`surgery bench`: time our kernels, the reference, torch's own kernels and other libraries' in one process."""
