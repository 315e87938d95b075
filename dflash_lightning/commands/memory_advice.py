"""What is said where memory runs out in a command that decodes."""

from __future__ import annotations

from dflash_lightning.training.out_of_memory import ran_out


def memory_advice(error: BaseException) -> str | None:
    """What to do about an error of an allocator; null for any other error."""
    if not ran_out(error):
        return None
    said = str(error).strip().partition("\n")[0] or type(error).__name__
    return (
        "out of memory: target, drafter and the prompts decoded at once need more than there is. Use a smaller batch "
        f"(--batch-size, decoding.batch_size), shorter prompts or answers, or --dtype bfloat16.\n  ({said})"
    )
