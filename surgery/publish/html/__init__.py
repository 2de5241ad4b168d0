"""The report page: what a conversion did, as one HTML file that needs nothing else."""
