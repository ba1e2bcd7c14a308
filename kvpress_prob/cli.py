"""Floor 6: the command line. Parses, calls, prints."""
