"""What can be said to ``dflash bench``."""

from __future__ import annotations

import argparse
from dataclasses import fields

from dflash_lightning.commands.argument_types import count
from dflash_lightning.commands.grammar_decode import Adder
from dflash_lightning.profiling.shape import Shape, option

KINDS = ("step", "target", "decode", "regenerate")
_SOME_TOKENS = 64


def add_speed(add: Adder) -> None:
    """What is measured, at which shape, and how often."""
    text = """\
Measure what a shape costs on this machine, with random weights and no download: CPU-seconds and seconds, memory beyond
what was held before, the share of each stage, and the rate of its work (counted by hand) beside that of the plain
matrix products that occur in it, measured in the same process.

  step         one training step: target, drafter forward and backward, optimizer
  target       the target's pass for the features that a drafter reads, beside a full forward pass
  decode       speculative decoding of --batch prompts, beside plain decoding
  regenerate   dflash regenerate of --batch prompts

  dflash bench step
  dflash bench step --over anchors=16,32,64 --json anchors.json
  dflash bench step --vocab 151936 --batch 2 --repeats 5
  dflash bench decode --block 8 --sequence 128

--over measures each value in a process of its own, so that its memory is its own. The default shape is SmolLM2-135M
with a drafter of five layers. Recipes named bench/... are trained with dflash fit, and measured with dflash measure."""
    parser = add("bench", "measure what a shape costs: seconds by stage, memory, rate", text)
    parser.add_argument("kind", metavar="KIND", choices=KINDS, help=", ".join(KINDS))
    sizes = parser.add_argument_group("sizes")
    for field in fields(Shape):
        sizes.add_argument(
            option(field.name),
            type=count,
            default=field.default,
            metavar="N",
            help=f"{field.metadata['help']}; default: %(default)s",
        )
    parser.add_argument(
        "--over", metavar="SIZE=a,b,c", help="one size at several values, such as anchors=16,32,64; a line for each"
    )
    parser.add_argument("--repeats", type=count, default=3, metavar="N", help="times it is measured; default: 3")
    parser.add_argument(
        "--new-tokens", type=count, metavar="N", help=f"of an answer, in decode and regenerate; default: {_SOME_TOKENS}"
    )
    parser.add_argument("--compiled", action="store_true", help="compile the draft step, in decode")
    parser.add_argument("--threads", type=count, default=1, metavar="N", help="of the CPU; default: 1")
    parser.add_argument("--device", metavar="D", default="cpu", help="cpu, cuda ...; default: cpu")
    parser.add_argument(
        "--dtype", choices=["float32", "bfloat16"], default="float32", help="of target and products; default: float32"
    )
    parser.add_argument("--json", metavar="FILE", help="also write the figures")


def new_tokens(args: argparse.Namespace) -> int:
    """Of an answer, where some are decoded."""
    return args.new_tokens or _SOME_TOKENS
