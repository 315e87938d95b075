"""What the linear layers of a target cost for few rows, by product: all those of SmolLM2-135M's decoder, once through.

python tests/measure_products.py            milliseconds, medians, and ratios to one row of F.linear
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor, nn

from dflash_lightning.ops.row_product import RowProduct

LAYERS, SHAPES = 30, [(960, 576), (576, 576), (3072, 576), (576, 1536)]  # q/k/v, o, gate/up, down
REPEATS = 21


def milliseconds(products: list[tuple[int, Callable[[Tensor], Tensor]]], rows: int) -> float:
    inputs = {width: torch.randn(rows, width) for width in {width for width, _ in products}}
    times = []
    for _ in range(REPEATS):
        begin = time.perf_counter()
        for width, product in products:
            product(inputs[width])
        times.append(1e3 * (time.perf_counter() - begin))
    return statistics.median(times)


@torch.no_grad()
def main() -> None:
    weights = [torch.randn(*shape) for _ in range(LAYERS) for shape in SHAPES]
    pack = torch.ops.mkldnn._reorder_linear_weight

    def packed(weight: Tensor) -> Callable[[Tensor], Tensor]:
        laid_out = pack(weight, 16)
        return lambda x: torch.ops.mkldnn._linear_pointwise(x, laid_out, None, "none", [], "")

    ways: dict[str, Callable[[Tensor], Callable[[Tensor], Tensor]]] = {
        "F.linear": lambda weight: lambda x: nn.functional.linear(x, weight),
        "oneDNN, packed": packed,
        "RowProduct": RowProduct,
    }
    products = {name: [(weight.shape[1], way(weight)) for weight in weights] for name, way in ways.items()}
    one = milliseconds(products["F.linear"], 1)
    print(f"one row: {one:.1f} ms; threads: {torch.get_num_threads()}, {torch.backends.cpu.get_cpu_capability()}")
    for rows in (2, 4, 8, 16):
        found = {name: milliseconds(some, rows) for name, some in products.items()}
        print(f"{rows:2d} rows: " + ", ".join(f"{name} {ms:.1f} ms ({ms / one:.2f}x)" for name, ms in found.items()))


if __name__ == "__main__":
    main()
