"""python -m kvops COMMAND ..."""

import argparse
import sys
from collections.abc import Sequence

from kvops.replay import command as replay

COMMANDS = (replay,)  # modules with add_parser(subparsers), which sets `run`: options -> exit code


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m kvops", description="Tools around the kvops operators.")
    subparsers = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    for command in COMMANDS:
        command.add_parser(subparsers)
    options = parser.parse_args(arguments)
    return options.run(options)


if __name__ == "__main__":
    sys.exit(main())
