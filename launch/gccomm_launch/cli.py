"""The `gccomm` command: finds the subcommand and imports nothing else."""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.metadata import version

__all__ = ["main"]

# Subcommand: (module and function that take its arguments, help).
_COMMANDS = {
    "run": ("gccomm_launch.run:run", "run a script on several processes of this host"),
    "bench": ("gccomm_launch.bench:bench", "time all-reduces, or measure the accuracy of codecs"),
    "netlab": (
        "gccomm_launch.netlab:netlab",
        "hosts on this machine with links of limited rate, and jobs in them",
    ),
    "trace": ("gccomm_launch.trace:trace", "put the timelines of several ranks into one file"),
    "codecs": ("gccomm_launch.codecs:codecs", "list the codecs that are installed"),
    "doctor": (
        "gccomm_launch.doctor:doctor",
        "say what is installed and works, and what to do else",
    ),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line `argv`, by default that of the process.

    Returns
    -------
    int
        Exit status: that of the subcommand, 130 after Ctrl-C, or 141 where nobody reads what it prints.

    Raises
    ------
    SystemExit
        Wrong arguments (status 2), ``--help`` or ``--version`` (status 0).
    """
    options = _parser().parse_args(argv)
    module, _, function = _COMMANDS[options.command][0].partition(":")
    try:
        status: int = getattr(import_module(module), function)(options.arguments)
        if sys.stdout is not None:
            sys.stdout.flush()
    except BrokenPipeError:  # whoever reads has had enough, such as `head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # where the interpreter's end writes
        return 128 + signal.SIGPIPE
    except KeyboardInterrupt:
        print(f"gccomm {options.command}: interrupted", file=sys.stderr)
        return 130
    return status


def _parser() -> argparse.ArgumentParser:
    width = max(map(len, _COMMANDS))
    lines = [f"  {name:<{width}}  {text}" for name, (_, text) in _COMMANDS.items()]
    lines += ["", "`gccomm COMMAND --help` shows the options of a command."]
    parser = argparse.ArgumentParser(
        prog="gccomm",
        description="Compressed all-reduce: run programs, measure, look up codecs.",
        epilog="\n".join(["commands:", *lines]),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"gccomm {version('gccomm')}")
    parser.add_argument("command", choices=list(_COMMANDS), metavar="COMMAND", help="see below")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="arguments of the command")
    return parser


if __name__ == "__main__":
    sys.exit(main())
