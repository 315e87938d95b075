"""Rows and prompts of the bench: three domains, answered by SmolLM2-135M-Instruct; see ``make_prompts``."""
