"""`python -m llqr`: the command line without an installed entry point."""

from llqr.lab.cli.app import main

if __name__ == "__main__":
    main()
