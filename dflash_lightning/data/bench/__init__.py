"""Rows and prompts of the bench: three domains, answered by SmolLM2-135M-Instruct with ``dflash regenerate``.

``make_prompts`` writes the prompts. ``train.jsonl.gz`` answers all 1,500 greedily. At temperature 1,
``train_sampled.jsonl.gz`` answers the first 600 (what ``bench/bv`` trains on), and ``train_sampled_more.jsonl.gz`` the
other 900 with seed 1 (``tail -n +601 train.jsonl``), for longer runs. Beside each stands how it was made
(``.meta.json``).
"""
