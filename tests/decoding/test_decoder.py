"""The assembled decoder on tiny real targets and drafters: its greedy text is what ``transformers.generate`` writes."""

import gc
import random
import weakref

import pytest
import torch

from dflash_lightning.decoding import DecodeStats, SamplingSpec, SpeculativeDecoder
from dflash_lightning.decoding.builder import BestChain, BestFirstTree, SampledChain
from dflash_lightning.decoding.choice import choose_strategies, named_part
from dflash_lightning.decoding.loop import decode_batch
from dflash_lightning.decoding.noise import Noise
from dflash_lightning.decoding.parts import DecodeParts
from dflash_lightning.decoding.sampling import Sampler
from dflash_lightning.decoding.verifier import MatchVerifier, RejectionVerifier
from dflash_lightning.target import TargetAdapter
from dflash_lightning.types import FeatureSpec

MAX_NEW = 40
PROMPTS = [[5, 9, 3, 200, 17], [44], [7, 7, 81, 120, 33, 2, 90, 61, 14, 250, 3]]


def _decoder(target, draft, **settings) -> SpeculativeDecoder:
    return SpeculativeDecoder(target, draft, max_length=settings.pop("max_length", 64), compile=False, **settings)


@pytest.mark.parametrize("batch_size", [1, 3])
def test_every_family_writes_what_generate_writes_whatever_is_drafted(
    family, batch_size, make_target, scripted_proposer, plain_generate
) -> None:
    """The drafter is right for a random number of drafts, so that rounds accept none, some and all; past the window."""
    target = make_target(family)
    expected = [plain_generate(target, prompt, MAX_NEW, ()) for prompt in PROMPTS]
    rng = random.Random(3)

    def make_drafts(first: int):
        def drafts(b: int, text: list[int], r: int) -> list[int]:
            whole = PROMPTS[first + b] + expected[first + b] + [0] * 10
            right, stand = whole[len(text) : len(text) + 4], rng.randrange(5)
            return [token if k < stand else (token + 1) % 272 for k, token in enumerate(right)]

        return drafts

    stats = DecodeStats(4)
    for first in range(0, 3, batch_size):
        sampler = Sampler(SamplingSpec(), Noise(0))
        adapter = _TokenFeatures(TargetAdapter(target, FeatureSpec((1,))))
        parts = DecodeParts(adapter, scripted_proposer(4, make_drafts(first)), BestChain(), MatchVerifier(), sampler)
        prompts, ids = PROMPTS[first : first + batch_size], list(range(batch_size))
        found = decode_batch(parts, prompts, ids, max_new_tokens=MAX_NEW, stop_ids=(), stats=stats)
        assert [g.output_ids for g in found] == expected[first : first + batch_size]
    assert all(stats.histogram), "rounds with no, partial and full acceptance"


@pytest.mark.parametrize("family", ["llama", "gemma3", "gpt_oss"])
def test_trees_write_what_generate_writes_and_keep_paths_of_all_shapes(
    family, make_target, scripted_proposer, plain_generate
) -> None:
    """At every depth the right token is the first, second or third candidate of three, or none of them."""
    target = make_target(family)
    expected = [plain_generate(target, prompt, MAX_NEW, ()) for prompt in PROMPTS]
    rng = random.Random(3)

    def make_scores(first: int):
        def scores(b: int, text: list[int], r: int) -> torch.Tensor:
            whole = PROMPTS[first + b] + expected[first + b] + [0] * 10
            logits = torch.zeros(4, 272)
            for depth, right in enumerate(whole[len(text) : len(text) + 4]):
                place = rng.choice([0, 0, 1, 2, 3])
                for k in range(3):
                    logits[depth, (right + k - place) % 272] = 8.0 - k / (1 + depth)
            return logits

        return scores

    stats = DecodeStats(4)
    for batch_size in (1, 3):
        for first in range(0, 3, batch_size):
            adapter = _TokenFeatures(TargetAdapter(target, FeatureSpec((1,))))
            proposer, sampler = scripted_proposer(4, make_scores(first)), Sampler(SamplingSpec(), Noise(0))
            parts = DecodeParts(adapter, proposer, BestFirstTree(budget=20), MatchVerifier(), sampler)
            prompts, ids = PROMPTS[first : first + batch_size], list(range(batch_size))
            found = decode_batch(parts, prompts, ids, max_new_tokens=MAX_NEW, stop_ids=(), stats=stats)
            assert [g.output_ids for g in found] == expected[first : first + batch_size]
    assert stats.histogram[0] and sum(stats.histogram[2:]), "rounds that keep the root alone, and paths"
    assert adapter.moved, "paths that do not lie in the cache's first rows"


class _TokenFeatures:
    """An adapter whose features are the tokens themselves, which is what the scripted proposer reads."""

    def __init__(self, adapter: TargetAdapter) -> None:
        self.adapter = adapter
        self.moved = False  # whether a path was kept whose rows were not the first ones

    trees, max_batch = True, None

    def check_trees(self):
        self.adapter.check_trees()

    def prefill(self, prompts):
        logits, features, lengths = self.adapter.prefill(prompts)
        width = features.hidden.shape[1]
        rows = torch.tensor([prompt + [0] * (width - len(prompt)) for prompt in prompts])
        features.hidden = rows[..., None, None].float()
        return logits, features, lengths

    def verify(self, tokens, *, parents=None, live=None):
        self.tokens = tokens
        return self.adapter.verify(tokens, parents=parents, live=live)

    def commit(self, path, keep):
        if path is not None:
            self.moved |= any(path[b, :kept].tolist() != list(range(kept)) for b, kept in enumerate(keep.tolist()))
        features = self.adapter.commit(path, keep)
        features.hidden = (self.tokens if path is None else self.tokens.gather(1, path))[..., None, None].float()
        return features


@pytest.mark.parametrize("settings", [{}, {"label_layout": "anchor_first", "block_size": 6}])
def test_a_trained_drafter_changes_the_speed_and_not_the_text(
    settings, make_target, make_draft, overfit_draft, plain_generate
) -> None:
    """Overfitted to two of three continuations, so that rounds accept none, some and all of their drafts."""
    target = make_target("qwen3")
    expected = [plain_generate(target, prompt, MAX_NEW, target.stop_ids) for prompt in PROMPTS]
    draft = make_draft(target, **settings)
    overfit_draft(target, draft, list(zip(PROMPTS[:2], expected[:2], strict=True)), steps=40)
    for batch_size in (1, 3):
        result = _decoder(target, draft, batch_size=batch_size).decode(
            PROMPTS, max_new_tokens=MAX_NEW, stop_ids=target.stop_ids
        )
        assert [g.output_ids for g in result.generations] == expected
        assert result.stats.histogram[0] and sum(result.stats.histogram[1:-1]) and result.stats.histogram[-1]
        assert result.stats.tau > 1.5
        assert not result.stats.compiled
        assert all(spent > 0 for spent in result.stats.seconds)
        assert sum(result.stats.seconds[:-1]) == pytest.approx(result.stats.seconds[-1], rel=0.05)
    plain = _decoder(target, None, batch_size=3).decode(PROMPTS, max_new_tokens=MAX_NEW, stop_ids=target.stop_ids)
    assert [g.output_ids for g in plain.generations] == expected
    assert plain.stats.tau == 1.0 and plain.stats.num_drafts == 0


def test_a_memorised_text_is_drafted_whole(make_target, make_draft, overfit_draft, plain_generate) -> None:
    """What decoding reads is what training read: a text known by heart is accepted block by block.

    The prompt is longer than two of the chunks by which prompts are taken in.
    """
    target = make_target("llama")
    prompt = [(37 * i) % 250 for i in range(150)]
    expected = plain_generate(target, prompt, 30, ())
    draft = make_draft(target)
    overfit_draft(target, draft, [(prompt, expected)], steps=80)
    result = _decoder(target, draft, max_length=180).decode([prompt], max_new_tokens=30, stop_ids=())
    assert result.generations[0].output_ids == expected
    assert result.stats.tau > 3.5


def test_a_stop_token_inside_an_accepted_block_ends_the_text_there(
    make_target, make_draft, overfit_draft, plain_generate
) -> None:
    """A drafter that knows the text by heart drafts past the stop token, which the loop must cut off."""
    target = make_target("llama")
    whole = plain_generate(target, PROMPTS[0], 30, ())
    draft = make_draft(target, block_size=6)
    overfit_draft(target, draft, [(PROMPTS[0], whole)], steps=80)
    free = _decoder(target, draft).decode(PROMPTS[:1], max_new_tokens=30, stop_ids=()).generations[0]
    assert free.output_ids == whole
    # Where each round's tokens begin; the first token of the text belongs to no round.
    begins = [1 + sum(free.committed[:r]) for r in range(len(free.committed))]
    inside = [
        (r, begins[r] + k)
        for r, count in enumerate(free.committed)
        for k in range(1, count - 2)  # drafts before and behind it are accepted too
        if free.accepted[r] == count - 1 and whole.index(whole[begins[r] + k]) == begins[r] + k
    ]
    assert inside, "no token occurs for the first time in the middle of an accepted block"
    for r, at in (inside[0], inside[-1]):
        stop_ids = (whole[at],)
        assert plain_generate(target, PROMPTS[0], 30, stop_ids) == whole[: at + 1]
        for batch, batch_size in ((PROMPTS[:1], 1), (PROMPTS, 3)):
            decoder = _decoder(target, draft, batch_size=batch_size)
            result = decoder.decode(batch, max_new_tokens=30, stop_ids=stop_ids)
            found = result.generations[0]
            assert found.output_ids == whole[: at + 1] and found.finish == "stop"
            assert len(found.accepted) == r + 1 and found.accepted[r] == free.accepted[r]
            assert found.committed == [*free.committed[:r], at + 1 - begins[r]]
            assert found.committed[r] < found.accepted[r], "the stop token was the last one of its block"


def test_reduced_draft_vocabulary_proposes_its_own_tokens(
    make_target, make_draft, overfit_draft, plain_generate
) -> None:
    target = make_target("qwen3")
    expected = [plain_generate(target, prompt, MAX_NEW, ()) for prompt in PROMPTS[:2]]
    vocabulary = sorted({token for text in expected for token in text} - {expected[0][11]})
    draft = make_draft(target, draft_vocab=vocabulary)
    overfit_draft(target, draft, list(zip(PROMPTS[:2], expected, strict=True)), steps=40)
    for verifier in (None, RejectionVerifier()):
        decoder = _decoder(target, draft, batch_size=2, verifier=verifier)
        result = decoder.decode(PROMPTS[:2], max_new_tokens=MAX_NEW, stop_ids=())
        assert [g.output_ids for g in result.generations] == expected
        assert result.stats.tau > 1.5


def test_sampling_by_match_equals_plain_sampling_in_any_batch(
    make_target, make_draft, overfit_draft, plain_generate
) -> None:
    target = make_target("llama")
    draft = make_draft(target)
    law = {"top_k": 20, "top_p": 0.9}
    spec = SamplingSpec(temperature=0.8, seed=4, **law)
    plain = _decoder(target, None, sampling=spec, batch_size=3).decode(
        PROMPTS, max_new_tokens=MAX_NEW, stop_ids=(), request_ids=[30, 10, 20]
    )
    expected = [g.output_ids for g in plain.generations]
    overfit_draft(target, draft, list(zip(PROMPTS[:2], expected[:2], strict=True)), steps=40)
    matching = _decoder(target, draft, sampling=spec, verifier=MatchVerifier(), batch_size=3)
    drafted = matching.decode(PROMPTS, max_new_tokens=MAX_NEW, stop_ids=(), request_ids=[30, 10, 20])
    assert [g.output_ids for g in drafted.generations] == expected
    assert drafted.stats.histogram[0] and sum(drafted.stats.histogram[1:-1]) and drafted.stats.histogram[-1]
    alone = _decoder(target, draft, sampling=spec, verifier=MatchVerifier())
    for prompt, request, text in zip(PROMPTS, [30, 10, 20], expected, strict=True):
        found = alone.decode([prompt], max_new_tokens=MAX_NEW, stop_ids=(), request_ids=[request])
        assert found.generations[0].output_ids == text
    other = _decoder(target, None, sampling=SamplingSpec(temperature=0.8, seed=5, **law))
    assert other.decode([PROMPTS[0]], max_new_tokens=MAX_NEW, stop_ids=()).generations[0].output_ids != expected[0]


def test_sampling_by_rejection_is_repeatable_and_not_batch_dependent(make_target, make_draft, plain_generate) -> None:
    target = make_target("llama")
    draft = make_draft(target)
    spec = SamplingSpec(temperature=0.9, top_k=30, seed=1)

    def decode(prompts, requests, batch_size):
        decoder = _decoder(target, draft, sampling=spec, batch_size=batch_size)
        result = decoder.decode(prompts, max_new_tokens=12, stop_ids=(), request_ids=requests)
        return [g.output_ids for g in result.generations]

    together = decode(PROMPTS, [3, 1, 2], 3)
    assert decode(PROMPTS, [3, 1, 2], 3) == together
    assert [decode([p], [r], 1)[0] for p, r in zip(PROMPTS, [3, 1, 2], strict=True)] == together
    assert decode(PROMPTS, [4, 5, 6], 3) != together


def test_the_caches_of_the_target_are_given_back(make_target, make_draft, plain_generate) -> None:
    target = make_target("llama")
    decoder = _decoder(target, make_draft(target), batch_size=2)
    for _ in range(2):  # and a decoder is as good as new afterwards
        result = decoder.decode(PROMPTS, max_new_tokens=9, stop_ids=())
        assert [g.output_ids for g in result.generations] == [plain_generate(target, p, 9, ()) for p in PROMPTS]
        assert all(layer.keys is None and layer.values is None for layer in decoder.parts.target._cache.layers)


@pytest.mark.parametrize("builder", [None, BestFirstTree(budget=4)])
def test_a_decoder_is_freed_with_its_last_reference(builder, make_target, make_draft) -> None:
    """It holds a copy of the target's weights as the CPU wants them, which must not pile up."""
    target = make_target("llama")
    draft = make_draft(target)
    gc.collect()
    gc.disable()
    try:
        decoder = _decoder(target, draft, batch_size=1, builder=builder)
        decoder.decode(PROMPTS[:1], max_new_tokens=4, stop_ids=())
        modules = decoder.parts.target._trunk.decoder.modules()
        parts = [weakref.ref(decoder), *map(weakref.ref, modules)]
        del decoder, modules
        assert len(parts) > 10 and not any(part() is not None for part in parts)
    finally:
        gc.enable()


def test_decoding_leaves_no_trace(make_target, make_draft) -> None:
    """Random state, modes, gradients and parameters of drafter and target are what they were."""
    target = make_target("qwen3")
    draft = make_draft(target).train()
    draft.head.eval()
    sum(p.sum() for p in draft.parameters()).backward()
    before = {
        name: (value.clone(), value.grad.clone(), value.requires_grad) for name, value in draft.named_parameters()
    }
    target_before = {name: value.clone() for name, value in target.model.state_dict().items()}
    modes = [module.training for module in draft.modules()]
    torch.manual_seed(5)
    state = torch.get_rng_state()
    for spec in (SamplingSpec(), SamplingSpec(temperature=1.0)):
        _decoder(target, draft, batch_size=3, sampling=spec).decode(PROMPTS, max_new_tokens=9, stop_ids=())
    assert torch.equal(torch.get_rng_state(), state)
    assert [module.training for module in draft.modules()] == modes
    for name, value in draft.named_parameters():
        old, grad, needs_grad = before[name]
        assert torch.equal(value, old) and torch.equal(value.grad, grad) and value.requires_grad == needs_grad
    assert all(torch.equal(value, target_before[name]) for name, value in target.model.state_dict().items())


@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad, torch.inference_mode])
def test_the_callers_grad_mode_does_not_matter(mode, make_target, make_draft) -> None:
    target = make_target("qwen3")
    draft = make_draft(target)
    decoder = _decoder(target, draft)
    with mode():
        first = decoder.decode(PROMPTS[:1], max_new_tokens=9, stop_ids=())
    with torch.autocast("cpu", dtype=torch.bfloat16):
        second = decoder.decode(PROMPTS[:1], max_new_tokens=9, stop_ids=())
    assert first.generations == second.generations
    sum((p * p).sum() for p in draft.parameters()).backward()  # parameters are still those of autograd


def test_limits_are_checked_before_anything_is_decoded(make_target, make_draft) -> None:
    target = make_target("llama")
    draft = make_draft(target)
    decoder = _decoder(target, draft, max_length=20)
    assert len(decoder.decode([[1] * 10], max_new_tokens=10, stop_ids=()).generations[0].output_ids) == 10
    with pytest.raises(ValueError, match=r"11 tokens of prompts\[1\] do not fit: this decoder has 20 .*a larger max"):
        decoder.decode([[1] * 10, [1] * 11], max_new_tokens=10, stop_ids=())
    with pytest.raises(ValueError, match="is empty"):
        decoder.decode([[]], max_new_tokens=10, stop_ids=())
    with pytest.raises(ValueError, match="decodes nothing"):
        decoder.decode([[1]], max_new_tokens=0, stop_ids=())
    with pytest.raises(ValueError, match="no two equal"):
        decoder.decode([[1], [2]], max_new_tokens=4, stop_ids=(), request_ids=[1, 1])
    short = make_target("llama", max_position_embeddings=24)
    decoder = _decoder(short, make_draft(short), max_length=100)
    with pytest.raises(ValueError, match=r"has 24 positions.*Use 12 at most"):
        decoder.decode([[1] * 10], max_new_tokens=14, stop_ids=())
    decoder.decode([[1] * 10], max_new_tokens=12, stop_ids=())
    _decoder(short, None, max_length=100).decode([[1] * 10], max_new_tokens=14, stop_ids=())


@pytest.mark.parametrize(
    ("temperature", "given", "expected"),
    [
        (0.0, {}, (BestChain, MatchVerifier)),
        (0.5, {}, (SampledChain, RejectionVerifier)),
        (0.5, {"verifier": MatchVerifier()}, (BestChain, MatchVerifier)),
        (0.0, {"verifier": RejectionVerifier()}, (SampledChain, RejectionVerifier)),
        (0.5, {"builder": BestChain()}, (BestChain, MatchVerifier)),
        (0.0, {"builder": SampledChain()}, (SampledChain, RejectionVerifier)),
        (0.0, {"builder": SampledChain(), "verifier": MatchVerifier()}, (SampledChain, MatchVerifier)),
    ],
)
def test_what_is_left_open_goes_with_the_temperature_and_with_what_is_given(temperature, given, expected) -> None:
    settings = {"builder": None, "verifier": None, **given}
    chosen = choose_strategies(settings["builder"], None, settings["verifier"], SamplingSpec(temperature))
    assert tuple(map(type, chosen)) == expected


def test_names_of_parts_are_known_or_refused() -> None:
    assert isinstance(named_part("verifier", "match"), MatchVerifier)
    with pytest.raises(ValueError, match=r"decoding.verifier: 'blok' is no verifier. Use null .*'match'"):
        named_part("verifier", "blok")
    with pytest.raises(ValueError, match=r"decoding.verifier: RejectionVerifier judges \['sampled'\] drafts"):
        choose_strategies(BestChain(), None, RejectionVerifier(), SamplingSpec())


def test_a_block_longer_than_a_chunk_of_the_prompt_fits_the_buffers(make_target, make_draft, plain_generate) -> None:
    """Near the end of the buffers a round writes its whole block past the last committed position."""
    target = make_target("llama")
    decoder = _decoder(target, make_draft(target, block_size=96), max_length=len(PROMPTS[0]) + MAX_NEW)
    (found,) = decoder.decode(PROMPTS[:1], max_new_tokens=MAX_NEW, stop_ids=()).generations
    assert found.output_ids == plain_generate(target, PROMPTS[0], MAX_NEW, ())
