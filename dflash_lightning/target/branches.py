"""Features of many continuations of one text: what a target computes when it verifies drafts.

A text is read once, with its keys and values; a continuation then costs its own rows only.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import torch
from jaxtyping import Int
from torch import Tensor
from transformers.cache_utils import Cache

from dflash_lightning.device import abilities
from dflash_lightning.errors import SettingError
from dflash_lightning.ops.plain_mode import plain_mode
from dflash_lightning.target.cache import text_cache
from dflash_lightning.target.families import VERIFIED_FAMILIES
from dflash_lightning.target.frozen import FrozenTarget
from dflash_lightning.target.intact import token_errors
from dflash_lightning.target.masks import branch_mask, packed_mask
from dflash_lightning.target.parallel import check_whole
from dflash_lightning.types import FeatureSpec, TargetFeatures

_PROBE = 12  # tokens


@dataclass(frozen=True)
class Piece:
    """Rows ``begin .. end - 1`` of batch row ``row``, read together; ``cache`` holds their keys and values."""

    row: int
    begin: int
    end: int
    cache: Cache


class ReadText:
    """A batch of packed rows as a target reads it, piece by piece: one document on a CPU, else a whole row.

    ``features`` are there where the text was read as a whole. Otherwise a piece is read when a branch asks for it, and
    no further than that branch sees.
    """

    def __init__(
        self,
        target: FrozenTarget,
        input_ids: Int[Tensor, "B S"],
        position_ids: Int[Tensor, "B S"],
        spec: FeatureSpec | None = None,
    ) -> None:
        check_attention(target)
        self.target = target
        self.input_ids, self.position_ids = input_ids, position_ids
        starts = torch.ones_like(position_ids, dtype=torch.bool)
        starts[:, 1:] = position_ids[:, 1:] - position_ids[:, :-1] != 1
        self.documents = [[*row.nonzero().flatten().tolist(), position_ids.shape[1]] for row in starts]
        self.features: TargetFeatures | None = None
        self.pieces: list[Piece] = []
        if spec is not None:
            with plain_mode(target.device):
                self.features = self._read_all(spec)

    def bounds(self, row: int) -> list[tuple[int, int]]:
        """Where the pieces of a batch row begin and end."""
        alone = not abilities(self.target.device).queues
        places = self.documents[row]
        return list(pairwise(places if alone else [places[0], places[-1]]))

    def _read_all(self, spec: FeatureSpec) -> TargetFeatures:
        width, dtype = self.target.facts.hidden_size, self.target.dtype
        room = TargetFeatures.empty(spec, tuple(self.input_ids.shape), width, dtype=dtype, device=self.target.device)  # type: ignore[arg-type]
        for row in range(len(self.input_ids)):
            for begin, end in self.bounds(row):
                piece, read = self.read(row, begin, end, spec)
                self.pieces.append(piece)
                for name, mine in room.tensors().items():
                    mine[row, begin:end] = read.tensors()[name][0]
        return TargetFeatures(spec.layer_ids, room.hidden, room.last_hidden, self.input_ids)

    def read(self, row: int, begin: int, end: int, spec: FeatureSpec) -> tuple[Piece, TargetFeatures]:
        """Read rows ``begin .. end - 1``, which begin a document."""
        target, trunk = self.target, self.target.trunk(spec)
        ids, positions = (x[row : row + 1, begin:end] for x in (self.input_ids, self.position_ids))
        cache = text_cache(target.facts.num_layers)
        packed = sum(begin <= start < end for start in self.documents[row][:-1]) > 1
        mask = packed_mask(target.model.config, positions, target.dtype) if packed else None
        output, stacked = trunk(ids, position_ids=positions, attention_mask=mask, cache=cache, use_cache=True)
        return Piece(row, begin, end, cache), trunk.features(ids, output, stacked)

    def seen_until(self, row: int, begin: int, end: int, stop: int, spec: FeatureSpec) -> Piece:
        """The piece ``begin .. end - 1``, read at least up to row ``stop - 1``."""
        for piece in self.pieces:
            if (piece.row, piece.begin) == (row, begin) and piece.end >= stop:
                return piece
        return self.read(row, begin, stop, spec)[0]


def branch_features(
    text: ReadText,
    tokens: Int[Tensor, "B N W"],
    intervals: tuple[Int[Tensor, "B N"], Int[Tensor, "B N"]],
    spec: FeatureSpec,
    wanted: tuple[Int[Tensor, "B N"], Int[Tensor, "B N"]] | None = None,
) -> tuple[TargetFeatures, Int[Tensor, "B R"]]:
    """Features of ``N`` branches of ``W`` tokens, and the positions of these rows; what decoding would compute there.

    Branch ``n`` continues its document at row ``end``: its first token stands where that row does, and sees the rows
    ``start <= j < end``. The result holds the wanted rows of the first branch, then those of the second, and so on; a
    batch row with fewer of them than others is filled up with zeros. Costs a forward of these rows, with an explicit
    mask of them and of what they see.

    Args:
        intervals: start and end of every branch, row indices; ``end`` is less than ``S``.
        wanted: first and last-plus-one row of each branch that is asked for; null: all ``W``. The tokens of a branch
            before its first wanted row must be those of the document: they are not run again.
    """
    target = text.target
    with plain_mode(target.device):
        first, last = (
            (torch.zeros_like(intervals[0]), torch.full_like(intervals[0], tokens.shape[2]))
            if (wanted is None)
            else wanted
        )
        counts = (last - first).clamp(min=0)
        most = int(counts.sum(1).max()) if counts.numel() else 0
        shape, width = (len(tokens), most), target.facts.hidden_size
        found = TargetFeatures.empty(spec, shape, width, dtype=target.dtype, tokens=True, device=target.device)
        found = found.map(torch.zero_)
        places = torch.zeros(shape, dtype=torch.long, device=tokens.device)
        for row in range(len(tokens)):
            rows = _Rows.of(counts[row], first[row])
            rows.run(text, row, tokens[row], (intervals[0][row], intervals[1][row]), spec, found, places)
        assert found.ids is not None
        return TargetFeatures(spec.layer_ids, found.hidden, found.last_hidden, found.ids), places


@dataclass(frozen=True)
class _Rows:
    """The wanted rows of a batch row, one after another: of which branch each is, which token of it, and which token
    of that branch is the first wanted one.
    """

    branch: Int[Tensor, " R"]
    index: Int[Tensor, " R"]
    first: Int[Tensor, " R"]

    @classmethod
    def of(cls, counts: Int[Tensor, " N"], first: Int[Tensor, " N"]) -> _Rows:
        branch = torch.repeat_interleave(torch.arange(len(counts), device=counts.device), counts)
        before = (counts.cumsum(0) - counts)[branch]
        return cls(branch, torch.arange(len(branch), device=counts.device) - before + first[branch], first[branch])

    def run(
        self,
        text: ReadText,
        row: int,
        tokens: Int[Tensor, "N W"],
        interval: tuple[Int[Tensor, " N"], Int[Tensor, " N"]],
        spec: FeatureSpec,
        found: TargetFeatures,
        places: Int[Tensor, "B R"],
    ) -> None:
        """Fill ``found`` and ``places`` of batch row ``row``, piece by piece of the text."""
        if not len(self.branch):
            return
        begins, ends = interval[0][self.branch], interval[1][self.branch]
        shared = ends + self.first  # rows of the document before it are seen, those of the branch are its own
        ids, stands = tokens[self.branch, self.index], text.position_ids[row, ends] + self.index
        # Branches may reach past the last position that there is; nothing there is ever decoded.
        stands = stands.clamp(max=_last_position(text.target))
        for begin, end in text.bounds(row):
            mine = ((begins >= begin) & (begins < end)).nonzero().flatten()
            if not len(mine):
                continue
            piece = text.seen_until(row, begin, end, int(shared[mine].max()), spec)
            own = torch.arange(piece.begin, piece.end, device=ids.device)
            document = (own >= begins[mine, None]) & (own < shared[mine, None])
            same = self.branch[mine, None] == self.branch[mine]
            visible = torch.cat([document, same & (self.index[mine, None] >= self.index[mine])], dim=1)
            keys = torch.cat([text.position_ids[row, own], stands[mine]])
            mask = branch_mask(
                text.target.model.config, visible[None], stands[None, mine], keys[None], text.target.dtype
            )
            trunk, rows = text.target.trunk(spec), ids[None, mine]
            output, stacked = trunk(
                rows, position_ids=stands[None, mine], attention_mask=mask, cache=piece.cache, use_cache=True
            )
            read = trunk.features(rows, output, stacked)
            for name, room in found.tensors().items():
                room[row, mine] = read.tensors()[name][0]
            places[row, mine] = stands[mine]


def check_attention(target: FrozenTarget) -> None:
    """Refuse a target whose attention takes no explicit mask.

    Raises:
        ValueError: names the setting.
    """
    implementation = target.model.config._attn_implementation
    if implementation not in ("sdpa", "eager"):
        raise SettingError(
            "target.attn_implementation",
            f"{implementation!r} takes no mask for drafts that continue a text at many places",
            "Use sdpa or eager",
        )


def check_branches(target: FrozenTarget) -> None:
    """Refuse a target that computes something else for a branch than for the same text by itself.

    The families that the test suite holds to this are not tried. Any other costs three forwards of a few tokens.

    Raises:
        ValueError: the features differ by more than rounding, or the attention takes no masks.
    """
    check_whole(target.cut, "conditioning", "it has the target read drafts of each rank's own")
    check_attention(target)
    if target.facts.model_type in VERIFIED_FAMILIES:
        return
    ids = (torch.arange(_PROBE, device=target.device)[None] * 37 + 3) % target.facts.vocab_size
    at, places, half = torch.arange(_PROBE, device=target.device)[None], ids.new_tensor([[2, 5]]), _PROBE // 2
    tokens = torch.stack([ids[:, 2 : 2 + half], ids[:, 5 : 5 + half]], dim=1)
    spec = FeatureSpec((target.facts.num_layers - 1,))
    text = ReadText(target, ids.flip(1).scatter(1, at[:, :5], ids[:, :5]), at)
    found, _ = branch_features(text, tokens, (places * 0, places), spec)
    alone = target.features(ids, at, spec, packed=False)
    error = float(token_errors(found.hidden[0, :half, 0], alone.hidden[0, 2 : 2 + half, 0]).max())
    if not error <= target.tolerance:
        raise SettingError(
            "target",
            f"{target.facts.name} (family {target.facts.model_type!r}) computes other features for drafts that "
            f"continue a text at many places than for each by itself (relative difference {error:.1e}, allowed "
            f"{target.tolerance:.0e})",
            f"Use a target of a verified family: {', '.join(VERIFIED_FAMILIES)}",
        )


def _last_position(target: FrozenTarget) -> int:
    limits = [target.facts.max_positions, *([] if target.limit is None else [target.limit.positions])]
    return min(limits) - 1
