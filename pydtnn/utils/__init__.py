"""Utilities without dependencies on other packages: errors, files, names, checks, machine facts."""
