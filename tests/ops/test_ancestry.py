"""Ancestors of token trees, by doubling, against walking up."""

import pytest
import torch

from dflash_lightning.ops.ancestry import ancestors_or_self


def walk(parents: list[int], node: int) -> set[int]:
    return {node} | (walk(parents, parents[node]) if node else set())


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 8, 9, 16, 17, 33])
def test_ancestors_are_what_walking_up_finds(size: int) -> None:
    generator = torch.Generator().manual_seed(size)
    trees = [[0, *range(size - 1)], [0] * size]  # a chain is the deepest tree, a star the widest
    for _ in range(6):
        trees.append([0, *(int(torch.randint(0, node, (1,), generator=generator)) for node in range(1, size))])
    found = ancestors_or_self(torch.tensor(trees))
    for parents, rows in zip(trees, found, strict=True):
        assert [set(row.nonzero()[:, 0].tolist()) for row in rows] == [walk(parents, node) for node in range(size)]
