"""`python -m rft`, which is how the launcher starts its workers."""

from rft.cli import main

if __name__ == "__main__":
    main()
