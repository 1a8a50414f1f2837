"""The command line: one file per command, flags shared through options.py. Nothing imports from here."""
