"""The `shoal` command."""

import argparse
import sys
from collections.abc import Sequence

from configs.base import ConfigError
from serve import cli_bench, cli_offline, cli_online
from serve.errors import EngineDeadError


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit status. Expected failures print one line, not a traceback."""
    parser = argparse.ArgumentParser(prog="shoal", description="Serve DeepSeek-family models on Ray.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    cli_online.add_commands(commands)
    cli_offline.add_commands(commands)
    cli_bench.add_commands(commands)
    args = parser.parse_args(argv)
    try:
        return int(args.run(args))
    except (ConfigError, EngineDeadError, ValueError, OSError) as error:
        print(f"shoal {args.command}: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
