"""`python -m gea …` is the same as `gea …`."""

from ops.cli import main

if __name__ == "__main__":
    main()
