"""`python -m tuner` is `tuner`."""

from tuner.cli.app import main

if __name__ == "__main__":
    main()
