"""`python -m everfed`."""

from everfed.cli import main

main()
