"""`shoal serve` and `shoal chat`."""

import argparse


def add_commands(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Adds both commands to the parser."""
