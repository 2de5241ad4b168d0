"""The command line: the Typer app (main.py), shared options, and one file for each long command."""
