"""Command line of a training run: configuration, parser, construction of objects, run folder."""
