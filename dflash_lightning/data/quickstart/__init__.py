"""The quickstart's data set: prompts made from templates, responses made by the target with ``dflash regenerate``."""
