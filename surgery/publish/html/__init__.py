"""The report page of a converted checkpoint: one self-contained HTML file."""
