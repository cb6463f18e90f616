"""`python -m fsample_cli` is the `fsample` command."""

from fsample_cli.main import main

if __name__ == "__main__":
    main()
