"""The command line of Strata. It knows the daemon only through the control socket and imports nothing else of it."""

__version__ = "0.1.0"
