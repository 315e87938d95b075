"""The law: temperature, top-k, top-p on what top-k left, lowest ids on ties."""

import pytest
import torch

from dflash_lightning.decoding.law import Law, first_argmax
from dflash_lightning.decoding.noise import Noise, Stream
from dflash_lightning.decoding.sampling import Sampler, SamplingSpec

P = torch.tensor([0.4, 0.3, 0.2, 0.1])


def law(logits: torch.Tensor, **settings: object) -> torch.Tensor:
    return Sampler(SamplingSpec(**settings), Noise(0)).law(logits).dense(logits.shape[-1])


def test_top_p_cuts_the_law_that_top_k_left() -> None:
    """k then p keeps two tokens, (.5714, .4286); p then k would keep three."""
    found = law(P.log(), temperature=1.0, top_k=3, top_p=0.75)
    torch.testing.assert_close(found, torch.tensor([4 / 7, 3 / 7, 0.0, 0.0]))
    torch.testing.assert_close(law(P.log(), temperature=1.0, top_p=0.75), torch.tensor([4 / 9, 3 / 9, 2 / 9, 0.0]))


@pytest.mark.parametrize("top_k", [None, 40])
def test_a_nucleus_of_everything_cuts_and_sorts_nothing(top_k: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rounding would cut the tail of a long law at a cumulated mass of 1, and sorting a vocabulary is what costs."""
    logits = 3 * torch.randn(2, 5000)
    expected = law(logits, temperature=1.0, top_k=top_k)
    if top_k is None:
        monkeypatch.setattr(torch.Tensor, "sort", lambda *args, **kw: pytest.fail("sorted"))
    monkeypatch.setattr("dflash_lightning.decoding.law._cut", lambda *args: pytest.fail("cut"))
    found = law(logits, temperature=1.0, top_k=top_k, top_p=1.0)
    assert torch.equal(found, expected)
    assert int((found > 0).sum()) == 2 * (top_k or 5000)


def test_order_of_logits_does_not_matter() -> None:
    order = torch.tensor([2, 0, 3, 1])
    for settings in ({"top_k": 3, "top_p": 0.75}, {"top_p": 0.75}, {"top_k": 2}, {}):
        expected = law(P.log(), temperature=0.7, **settings)[order]
        torch.testing.assert_close(law(P.log()[order], temperature=0.7, **settings), expected)


def test_ties_keep_the_lowest_ids() -> None:
    logits = torch.tensor([[0.0, 1.0, 0.0, 0.0, 1.0, 0.0]])
    assert law(logits).tolist() == [[0, 1, 0, 0, 0, 0]]
    assert (law(logits, temperature=1.0, top_k=1) > 0).nonzero()[:, 1].tolist() == [1]
    assert (law(logits, temperature=1.0, top_k=4) > 0).nonzero()[:, 1].tolist() == [0, 1, 2, 4]
    # Mass before ranks 0, 1, 2, 3, ..: 0, .288, .576, .682; so .6 keeps three, and the third is the lowest of the rest.
    assert (law(logits, temperature=1.0, top_p=0.6) > 0).nonzero()[:, 1].tolist() == [0, 1, 4]
    assert (law(logits, temperature=1.0, top_k=5, top_p=0.65) > 0).nonzero()[:, 1].tolist() == [0, 1, 4]


def test_the_argmax_is_the_first_of_the_best() -> None:
    scores = torch.randint(0, 4, (5, 3, 640)).float()  # hundreds of ties in every row
    assert torch.equal(first_argmax(scores), scores.argmax(-1))
    assert torch.equal(first_argmax(scores[..., :70]), scores[..., :70].argmax(-1))
    assert first_argmax(torch.full((2, 128), -torch.inf)).tolist() == [0, 0]


def test_it_equals_the_processors_of_transformers() -> None:
    from transformers import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

    logits = 3 * torch.randn(20, 50)
    ids = torch.zeros(20, 1, dtype=torch.long)
    for temperature, top_k, top_p in ((0.7, 20, 0.9), (1.3, 7, 0.5), (1.0, 50, 0.95), (0.5, 1, 0.3)):
        scores = TemperatureLogitsWarper(temperature)(ids, logits)
        scores = TopPLogitsWarper(top_p)(ids, TopKLogitsWarper(top_k)(ids, scores))
        found = law(logits, temperature=temperature, top_k=top_k, top_p=top_p)
        torch.testing.assert_close(found, scores.softmax(-1))


def test_a_single_allowed_token_is_always_drawn() -> None:
    logits = torch.zeros(1, 500, 9)
    logits[..., 7] = 1.0
    sampler = Sampler(SamplingSpec(temperature=1.0, top_k=1), Noise(3))
    where = torch.arange(500)[None]
    assert (sampler.choose(logits, torch.tensor([5]), where) == 7).all()


def test_draws_follow_the_law() -> None:
    """20000 draws of a four-token law: chi-squared with 3 degrees of freedom below its 99.99 % point, 21.1."""
    sampler, n = Sampler(SamplingSpec(temperature=1.0), Noise(1)), 20000
    drawn = sampler.choose(P.log().expand(1, n, 4), torch.tensor([0]), torch.arange(n)[None])
    counts = drawn[0].bincount(minlength=4).double()
    assert float(((counts - n * P.double()) ** 2 / (n * P.double())).sum()) < 21.1


def test_noise_depends_on_what_it_is_for_and_on_nothing_else() -> None:
    noise, ids, where = Noise(7), torch.tensor([3, 9]), torch.arange(4)[None]
    tokens = torch.arange(11).expand(2, 4, 11)
    both = noise.exponential(Stream.TOKEN, ids, where, tokens)
    torch.manual_seed(123)
    assert torch.equal(both[1:, 2:, 5:], noise.exponential(Stream.TOKEN, ids[1:], where[:, 2:], tokens[1:, 2:, 5:]))
    others = [
        Noise(8).exponential(Stream.TOKEN, ids, where, tokens),
        noise.exponential(Stream.DRAFT, ids, where, tokens),
        noise.exponential(Stream.TOKEN, ids + 1, where, tokens),
        noise.exponential(Stream.TOKEN, ids, where + 1, tokens),
        noise.exponential(Stream.TOKEN, ids, where, tokens + 1),
    ]
    assert all((other != both).all() for other in others)


def test_how_a_law_is_held_does_not_change_what_is_drawn() -> None:
    law = Law(torch.rand(2, 300, 40).softmax(-1))
    order = torch.rand(2, 300, 40).argsort(-1)
    held = Law(law.mass.gather(-1, order), order)
    sampler = Sampler(SamplingSpec(temperature=1.0), Noise(2))
    where = torch.arange(300)[None]
    drawn = sampler.draw(law, Stream.TOKEN, torch.tensor([1, 2]), where)
    assert torch.equal(sampler.draw(held, Stream.TOKEN, torch.tensor([1, 2]), where), drawn)
    torch.testing.assert_close(held.of(drawn), law.of(drawn))
    torch.testing.assert_close(held.dense(40), law.mass)


def test_a_nucleus_is_the_same_among_candidates_and_in_the_whole_vocabulary() -> None:
    """Over 5000 tokens: narrow laws are cut among the best 1024, flat ones need the sort; either equals a plain cut."""
    for scale in (3.0, 0.01):
        logits = scale * torch.randn(4, 5000).round(decimals=1)  # rounded, so that there are ties at the border
        values, order = logits.double().softmax(-1).sort(dim=-1, descending=True, stable=True)
        kept = torch.where(values.cumsum(-1) - values < 0.9, values, 0.0)
        expected = torch.zeros(4, 5000).double().scatter(-1, order, kept / kept.sum(-1, keepdim=True))
        torch.testing.assert_close(law(logits, temperature=1.0, top_p=0.9).double(), expected, atol=1e-6, rtol=1e-4)


def test_uniform_numbers_are_uniform_and_uncorrelated() -> None:
    uniform = Noise(0).uniform(Stream.ACCEPT, torch.arange(200), torch.arange(100)[None])
    assert uniform.min() > 0 and uniform.max() < 1
    assert abs(float(uniform.mean()) - 0.5) < 4 * (1 / 12 / uniform.numel()) ** 0.5
    assert abs(float(uniform.var()) - 1 / 12) < 0.002
    for a, b in ((uniform[:, 1:], uniform[:, :-1]), (uniform[1:], uniform[:-1])):
        assert abs(float(torch.corrcoef(torch.stack([a.flatten(), b.flatten()]))[0, 1])) < 0.03


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"temperature": -1.0}, "Use 0 for greedy"),
        ({"temperature": float("inf")}, "finite. Use 0 for greedy"),
        ({"temperature": float("nan")}, "finite. Use 0 for greedy"),
        ({"temperature": "1"}, "'1' is not a number"),
        ({"seed": 0.5}, "0.5 is not a whole number"),
        ({"top_k": 0}, "Use 1 or more, or null"),
        ({"top_p": 0.0}, "Use null for all tokens"),
        ({"top_p": 1.5}, "Use null for all tokens"),
    ],
)
def test_impossible_settings_are_refused(settings: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SamplingSpec(**settings)


@pytest.mark.parametrize("truncation", [{}, {"top_k": 3}, {"top_p": 0.9}])
def test_extreme_temperatures_give_the_laws_that_they_tend_to(truncation: dict) -> None:
    """The coldest shares all among exact ties, the hottest among all tokens; logits may be large as well."""
    logits = torch.tensor([[1.0, 3.0, 3.0, -2.0, 2.9999], [0.0, 1e-30, -1.0, 1e-30, -1e30], [9e4, 1.0, 2.0, 3.0, 9e4]])
    ties = torch.tensor([[0, 0.5, 0.5, 0, 0], [0, 0.5, 0, 0.5, 0], [0.5, 0, 0, 0, 0.5]])
    for temperature in (1e-40, 1e-45, 1e-310, 1e-37):
        found = law(logits, temperature=temperature, **truncation)
        torch.testing.assert_close(found, ties)
    if not truncation:
        for temperature in (1e39, 1e300):
            torch.testing.assert_close(law(logits[:1], temperature=temperature), torch.full((1, 5), 0.2))


def test_any_whole_number_is_a_seed_of_its_own() -> None:
    def draws(seed: int) -> tuple:
        return tuple(Noise(seed).uniform(Stream.TOKEN, torch.arange(3), torch.arange(4)[None]).flatten().tolist())

    seeds = [0, 1, -1, 2**61, 2**62, 2**63, 2**64 - 1, 2**64, 2**64 + 1, -(2**64), 2**200, -(2**200), 10**30]
    assert len({draws(seed) for seed in seeds}) == len(seeds)
    assert draws(2**64) == draws(2**64)
    # What small seeds gave before larger ones were allowed.
    assert draws(3)[:3] == pytest.approx((0.868587494, 0.332016379, 0.677642465))
    assert draws(-5)[:3] == pytest.approx((0.967294097, 0.084484234, 0.373180360))
