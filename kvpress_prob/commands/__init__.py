"""Floor 8: subcommands of the command line that are more than a call, one a file."""
