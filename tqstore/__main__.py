"""`python -m tqstore`: the command line."""

from tqstore.cli import main

main()
