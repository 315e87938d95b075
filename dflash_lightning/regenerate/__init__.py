"""Answers that the target writes itself: prompts in, training rows out (``dflash regenerate``)."""
