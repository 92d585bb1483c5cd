"""The command ``xpress``: ``xpress demo | info``."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one subcommand and return the exit status of the process."""
    options = _parser().parse_args(arguments)
    status: int = options.run(options)
    return status


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="xpress",
        description="XPress: Jacobi refinement of block-diffusion drafts for speculative decoding.",
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    info = commands.add_parser("info", help="versions, instruction set, what runs on the GPU")
    info.add_argument("--json", action="store_true", help="print JSON")
    info.set_defaults(run=_run_info)
    return parser


def _run_info(options: argparse.Namespace) -> int:
    try:
        from xpress_ext.build_info import build_info, format_build_info

        info = build_info()
    except (ImportError, ValueError) as error:
        print(f"xpress: {error}", file=sys.stderr)
        return 1
    print(json.dumps(info.as_dict(), indent=2) if options.json else format_build_info(info))
    return 0


if __name__ == "__main__":
    sys.exit(main())
