"""`python -m omnicache_cli.cli`, for where the `omnicache` script is not on the path."""

from omnicache_cli.cli.main import main

main()
