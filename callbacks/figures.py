"""Pictures of how drafts fare: the accepted-length histogram and acceptance by slot."""

from __future__ import annotations

from matplotlib.figure import Figure

from dflash_lightning.decoding import DecodeStats

# Room for labels as shares of the figure. matplotlib's own layout engine finds as much in three times the time.
_MARGINS = {"left": 0.14, "right": 0.97, "bottom": 0.17, "top": 0.9}


def histogram_figure(stats: DecodeStats) -> Figure:
    """Share of rounds by number of accepted drafts; the last bar is the ceiling bin (the whole block stood)."""
    figure = Figure(figsize=(5, 3))
    axes = figure.subplots(gridspec_kw=_MARGINS)
    total = max(1, sum(stats.histogram))
    colors = ["tab:blue"] * stats.num_drafts + ["tab:orange"]
    axes.bar(range(stats.num_drafts + 1), [count / total for count in stats.histogram], color=colors)
    axes.set(
        xlabel="accepted drafts", ylabel="share of rounds", title=f"tau {stats.tau:.2f}, ceiling {stats.ceiling:.1%}"
    )
    return figure


def acceptance_figure(stats: DecodeStats) -> Figure:
    """Conditional acceptance (given that all slots before stood) and survival (their running product) by slot."""
    figure = Figure(figsize=(5, 3))
    axes = figure.subplots(gridspec_kw=_MARGINS)
    slots = range(1, stats.num_drafts + 1)
    axes.plot(slots, stats.conditional_acceptance, marker="o", label="conditional")
    axes.plot(slots, stats.survival, marker="s", label="survival")
    axes.set(xlabel="slot", ylabel="share of rounds", ylim=(0, 1))
    axes.legend()
    return figure
