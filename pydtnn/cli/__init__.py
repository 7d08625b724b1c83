"""From the command line to a run: configuration, parser, the objects it asks for, its folder."""
