"""`python -m tqstore.cli`."""

from tqstore.cli import main

main()
