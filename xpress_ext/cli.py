"""The command ``xpress``: ``xpress demo | convert | info``."""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one subcommand and return the exit status of the process."""
    options = _parser().parse_args(arguments)
    try:
        status: int = options.run(options)
        sys.stdout.flush()
    except BrokenPipeError:  # the reader has what it wanted
        _discard_output()
        return 128 + signal.SIGPIPE
    except OSError as error:
        _discard_output()
        print(f"xpress: {error}", file=sys.stderr)
        return 1
    return status


def _discard_output() -> None:
    """Send what is still buffered nowhere, so that the flush at exit cannot fail again."""
    with open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), sys.stdout.fileno())


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="xpress",
        description="XPress: Jacobi refinement of block-diffusion drafts for speculative decoding.",
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    info = commands.add_parser("info", help="versions, instruction set, what runs on the GPU")
    info.add_argument("--json", action="store_true", help="print JSON")
    info.set_defaults(run=_run_info)
    demo = commands.add_parser("demo", help="one prompt decoded three ways, side by side")
    source = demo.add_mutually_exclusive_group()
    source.add_argument("--prompt", metavar="TEXT", help="decode the answer to this text")
    source.add_argument(
        "--prompts",
        type=Path,
        metavar="FILE",
        help="one prompt a line, or JSON lines with prompt, question or turns",
    )
    demo.add_argument("--plain", action="store_true", help="plain lines instead of panes")
    demo.add_argument("--html", type=Path, metavar="FILE", help="write a page that replays it")
    demo.add_argument("--max-new-tokens", type=int, default=96, metavar="N", help="default: 96")
    demo.add_argument("--checkpoint", type=Path, metavar="DIR", help="drafter and refiner to use")
    demo.set_defaults(run=_run_demo)
    convert = commands.add_parser("convert", help="a checkpoint in another of the three formats")
    convert.add_argument("source", type=Path, metavar="SRC", help="folder, or .pt file")
    convert.add_argument("destination", type=Path, metavar="DST", help="what to write, new")
    convert.add_argument(
        "--to",
        choices=["A", "B", "C"],
        required=True,
        help="A: speculators, B: serving (folders), C: training reference (a .pt file)",
    )
    convert.add_argument(
        "--config",
        type=Path,
        metavar="FILE",
        help="config.json in format B, for what the args of a .pt file lack",
    )
    convert.set_defaults(run=_run_convert)
    return parser


def _run_convert(options: argparse.Namespace) -> int:
    from xpress_ext.checkpoint import convert_checkpoint
    from xpress_ext.checkpoint.files import read_config

    try:
        config = None if options.config is None else read_config(options.config)
        convert_checkpoint(options.source, options.destination, options.to, config)
    except (ValueError, FileExistsError, FileNotFoundError) as error:
        print(f"xpress convert: {error}", file=sys.stderr)
        return 1
    print(f"{options.destination} written in format {options.to}")
    return 0


def _run_info(options: argparse.Namespace) -> int:
    try:
        from xpress_ext.build_info import build_info, format_build_info

        info = build_info()
    except (ImportError, ValueError) as error:
        print(f"xpress: {error}", file=sys.stderr)
        return 1
    print(json.dumps(info.as_dict(), indent=2) if options.json else format_build_info(info))
    return 0


def _run_demo(options: argparse.Namespace) -> int:
    try:
        from xpress_ext.demo import DemoError, DemoOptions, run_demo
    except ImportError as error:
        print(f"xpress: {error}", file=sys.stderr)
        return 1
    names = ("prompt", "prompts", "plain", "html", "max_new_tokens", "checkpoint")
    try:
        run_demo(DemoOptions(**{name: getattr(options, name) for name in names}))
    except DemoError as error:
        print(f"xpress demo: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("xpress demo: stopped", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
