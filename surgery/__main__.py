"""`python -m surgery`: the command line."""

from surgery.cli.main import main

main()
