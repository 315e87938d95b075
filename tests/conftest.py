"""Shared fixtures: tiny random targets of the supported families and a byte-level tokenizer with a chat template.

Tests ask for the *functions* ``make_tiny_model(family)`` and ``make_target(family)``; nothing here needs a download.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch
from matplotlib.figure import Figure
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoConfig as HFConfig
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel, PreTrainedTokenizerFast

from dflash_lightning.block import Anchored
from dflash_lightning.conditioning import KVInjection
from dflash_lightning.drafter import BlockTransformer
from dflash_lightning.head import MarginalHead
from dflash_lightning.model import DraftModel, make_draft_config
from dflash_lightning.target import FrozenTarget
from dflash_lightning.types import BlockLayout, Document

VOCAB_SIZE = 272  # embedding rows: 256 bytes, 6 specials, 10 spare rows
SPECIALS = ["<|pad|>", "<|bos|>", "<|im_start|>", "<|im_end|>", "<|endoftext|>", "<|spare|>"]
PAD, BOS, IM_START, IM_END, ENDOFTEXT, SPARE = range(256, 262)
SLIDING_WINDOW = 8  # short, so that tests of a few dozen tokens go far past it
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

_SIZES = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 512,
    "initializer_range": 0.25,
    "pad_token_id": PAD,
    "bos_token_id": BOS,
    "eos_token_id": IM_END,
    "tie_word_embeddings": False,
}
_ALTERNATING = ["sliding_attention", "full_attention"] * 2
_FAMILY_SETTINGS: dict[str, dict] = {
    "llama": {"tie_word_embeddings": True},
    "qwen3": {},
    "qwen2": {},
    "gemma3": {
        "model_type": "gemma3_text",
        "sliding_window": SLIDING_WINDOW,
        "layer_types": _ALTERNATING,
        "query_pre_attn_scalar": 8,
        "final_logit_softcapping": 5.0,
    },
    "gemma2": {
        "sliding_window": SLIDING_WINDOW,
        "layer_types": _ALTERNATING,
        "query_pre_attn_scalar": 8,
        "final_logit_softcapping": 5.0,
        "attn_logit_softcapping": 20.0,
    },
    "gpt_oss": {
        "sliding_window": SLIDING_WINDOW,
        "layer_types": _ALTERNATING,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    },
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen3_moe": {
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    },
    "mistral": {"sliding_window": SLIDING_WINDOW},
    "granite": {
        "logits_scaling": 3.0,
        "embedding_multiplier": 2.5,
        "attention_multiplier": 0.3,
        "residual_multiplier": 0.7,
    },
    "cohere": {"logit_scale": 0.25, "tie_word_embeddings": True},
}
FAMILIES = ("llama", "qwen3", "gemma3", "gpt_oss", "mixtral", "qwen3_moe")


def tiny_config(family: str, **overrides: object) -> PretrainedConfig:
    """Configuration of a tiny model of ``family``: 4 layers, hidden 32, vocabulary 272."""
    settings = {"model_type": family, **_SIZES, **_FAMILY_SETTINGS[family], **overrides}
    return HFConfig.for_model(**settings)


def tiny_model(family: str, seed: int = 0, **overrides: object) -> PreTrainedModel:
    """Tiny random fp32 model in eval mode; norm gains and biases are random too, so none is forgotten unseen."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(tiny_config(family, **overrides), dtype=torch.float32)
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.data += 0.2 * torch.randn_like(parameter)
    model.generation_config.eos_token_id = model.config.eos_token_id
    return model.eval()


def byte_tokenizer_object() -> PreTrainedTokenizerFast:
    """Byte-level tokenizer: one id per byte (0..255) and six specials; ChatML template; eos is ``<|im_end|>``."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    core = Tokenizer(models.BPE(vocab={symbol: i for i, symbol in enumerate(alphabet)}, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIALS])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core, pad_token="<|pad|>", bos_token="<|bos|>", eos_token="<|im_end|>", model_max_length=512
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


@pytest.fixture(scope="session")
def byte_tokenizer() -> PreTrainedTokenizerFast:
    return byte_tokenizer_object()


@pytest.fixture(scope="session")
def make_tiny_model() -> Callable[..., PreTrainedModel]:
    """``make_tiny_model(family, seed=0, **config_overrides)``: a fresh tiny model every time."""
    return tiny_model


@pytest.fixture(scope="session")
def make_target(byte_tokenizer: PreTrainedTokenizerFast) -> Callable[..., FrozenTarget]:
    """``make_target(family="llama", seed=0, **config_overrides)``: a fresh frozen target with the byte tokenizer."""

    def make(family: str = "llama", seed: int = 0, **overrides: object) -> FrozenTarget:
        return FrozenTarget(tiny_model(family, seed, **overrides), byte_tokenizer, name=f"tiny-{family}")

    return make


@pytest.fixture(scope="session")
def tiny_target(make_target: Callable[..., FrozenTarget]) -> FrozenTarget:
    """A tiny Llama with the byte tokenizer, shared by the whole session: never changed by anything."""
    return make_target("llama")


MASK = SPARE + 1  # the lowest embedding row that is no token


def block_layout(
    anchors: list[list[int]], *, block_size: int, starts: list[list[int]] | None = None, ids: torch.Tensor | None = None
) -> BlockLayout:
    """Unlabelled blocks at row indices ``anchors`` of documents that begin at ``starts``; anchor -1 is a padding block.

    Slot 0 holds the id at the anchor (``ids`` [B, S], default 7), the others the mask id.
    """
    given = torch.tensor(anchors)
    keep = given >= 0
    rows = given.clamp(min=0)
    first = torch.zeros_like(rows) if starts is None else torch.tensor(starts)
    slots = torch.full((*rows.shape, block_size), MASK)
    slots[..., 0] = 7 if ids is None else ids.gather(1, rows)
    none = torch.zeros_like(slots, dtype=torch.bool)
    return BlockLayout(
        anchors=rows,
        keep=keep,
        context_start=torch.where(keep, first, 0),
        context_end=torch.where(keep, rows, 0),
        input_ids=slots,
        position_ids=torch.where(keep, rows - first, 0)[..., None] + torch.arange(block_size),
        predicts=none,
        label_index=torch.zeros_like(slots),
        labels=torch.zeros_like(slots),
        prev_ids=torch.zeros_like(slots),
        scored=none,
        valid=none,
        rows=torch.zeros(0, dtype=torch.long),
    )


@pytest.fixture(scope="session")
def make_layout() -> Callable[..., BlockLayout]:
    """``make_layout(anchors, block_size=, starts=None, ids=None)``: see ``block_layout``."""
    return block_layout


@pytest.fixture(scope="session")
def make_draft() -> Callable[..., DraftModel]:
    """``make_draft(target, block_size=4, target_layer_ids=[0, 2], draft_vocab_size=None, **drafter_settings)``."""

    def make(
        target: FrozenTarget,
        *,
        block_size: int = 4,
        target_layer_ids: list[int] | None = None,
        draft_vocab_size: int | None = None,
        seed: int = 0,
        **settings: object,
    ) -> DraftModel:
        config = make_draft_config(
            target.facts,
            block=Anchored(block_size=block_size),
            conditioning=KVInjection(target_layer_ids=[0, 2] if target_layer_ids is None else target_layer_ids),
            drafter=BlockTransformer(**{"num_layers": 2, "init_std": 0.2, **settings}),  # type: ignore[arg-type]
            head=MarginalHead(),
            mask_token_id=MASK,
            draft_vocab_size=draft_vocab_size,
        )
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            model = DraftModel(config)
            for parameter in model.parameters():
                if parameter.ndim == 1:  # gains other than 1, so that none is forgotten unseen
                    parameter.data += 0.2 * torch.randn_like(parameter)
        return model.eval()

    return make


def fit_to(draft: DraftModel, target: FrozenTarget, ids: torch.Tensor, *, prompt_length: int) -> DraftModel:
    """Teach ``draft`` the continuation in ``ids`` [1, S], one row from the target, so that many drafts are accepted.

    Blocks at every other anchor or so are taught: some rounds then accept all drafts, some a few, some none.
    """
    text = ids[0]
    document = Document(0, text, torch.arange(len(text)) >= prompt_length)
    block = Anchored(block_size=draft.config.block_size, num_anchors=12)
    layout = block.blocks(document, draft.alignment, seed=0, epoch=0)
    positions, scored = torch.arange(len(text))[None], layout.scored
    features = target.features(ids, positions, draft.required())
    optimizer = torch.optim.Adam(draft.train().parameters(), lr=1e-2)
    for _ in range(40):
        hidden = draft.block_hidden(target.embed(layout.input_ids), layout, features, positions, target.lm)
        loss = torch.nn.functional.cross_entropy(target.lm.logits(hidden[scored]), layout.labels[scored])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return draft.eval()


@pytest.fixture(scope="session")
def fit() -> Callable[..., DraftModel]:
    """``fit(draft, target, ids, prompt_length=)``: see ``fit_to``."""
    return fit_to


@pytest.fixture(params=FAMILIES)
def family(request: pytest.FixtureRequest) -> str:
    """Name of each family that every promise is held on."""
    return request.param


@pytest.fixture(autouse=True)
def _fixed_seed() -> None:
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _process_as_before() -> Iterator[None]:
    """No test sees another's traces: Lightning sets variables, and ignores Ctrl-C once it has seen one."""
    environment, folder, on_interrupt = dict(os.environ), Path.cwd(), signal.getsignal(signal.SIGINT)
    yield
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    signal.signal(signal.SIGINT, on_interrupt)


@pytest.fixture(scope="session")
def make_run(
    tmp_path_factory: pytest.TempPathFactory, byte_tokenizer: PreTrainedTokenizerFast, blank_pictures: None
) -> Callable[..., Path]:
    """``make_run(family, rows, *words)``: a folder with a tiny target, data, prompts and the run ``runs/a``.

    ``rows`` are files of eight chats each: how an answer goes on, by file name. ``words`` go behind ``dflash fit``.
    """

    def make(family: str, rows: dict[str, str], *words: str) -> Path:
        place = tmp_path_factory.mktemp("run")
        tiny_model(family).save_pretrained(place / "target")
        byte_tokenizer.save_pretrained(place / "target")
        for name, answer in rows.items():
            chats = [(f"say {i}", answer.format(i=i)) for i in range(8)]
            messages = [[{"role": "user", "content": a}, {"role": "assistant", "content": b}] for a, b in chats]
            (place / name).write_text("".join(json.dumps({"messages": chat}) + "\n" for chat in messages))
        (place / "prompts.jsonl").write_text('{"turns": ["tell me of this"]}\n{"turns": ["and now of that"]}\n')
        cwd, before = Path.cwd(), dict(os.environ)
        os.chdir(place)
        try:
            assert import_module("dflash_lightning.cli").main(["fit", *words, "run_dir=runs/a"]) == 0
        finally:
            os.chdir(cwd)
            os.environ.clear()
            os.environ.update(before)
        return place

    return make


@pytest.fixture(scope="session")
def blank_pictures() -> Iterator[None]:
    """The pictures of an evaluation are blank: drawing them takes a quarter of a small run."""
    evaluation = import_module("dflash_lightning.callbacks.speculative_eval")  # here: many tests need no Lightning
    with pytest.MonkeyPatch.context() as patch:
        for name in ("histogram_figure", "acceptance_figure"):
            patch.setattr(evaluation, name, lambda stats: Figure(figsize=(0.1, 0.1)))
        yield


# -- processes --------------------------------------------------------------------------------------------------------


def run_group(command: list[str], *, timeout: float, **settings: Any) -> subprocess.CompletedProcess[str]:
    """As ``subprocess.run`` with its output captured, but after ``timeout`` seconds everything it has started is ended.

    ``subprocess.run`` ends the process alone, and then waits for whoever still holds its pipes: ranks that wait for
    each other do so for ever.
    """
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "start_new_session": True}
    with subprocess.Popen(command, **pipes, **settings) as process:
        try:
            out, error = process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            out, error = process.communicate()
            pytest.fail(f"{command} had not ended after {timeout} s\n{out[-2000:]}\n{error[-4000:]}")
    return subprocess.CompletedProcess(command, process.returncode, out, error)


@pytest.fixture(scope="session", name="run_group")
def run_group_fixture() -> Callable[..., subprocess.CompletedProcess[str]]:
    """``run_group(command, timeout=.., **settings)``: see there."""
    return run_group


class Forked:
    """``work()`` in a copy of this process, which has imported everything already. Not for ranks: copies of a process
    that has done much may wait for each other for ever in gloo.

    What it prints goes to the file ``output``, and what it complains of to a file beside that (``errors``).
    """

    def __init__(self, work: Callable[[], object], output: Path) -> None:
        self.output, self.errors = output, output.with_suffix(".err")
        self.status: int | None = None
        self.pid = os.fork()
        if self.pid == 0:
            self._work(work)

    def _work(self, work: Callable[[], object]) -> NoReturn:
        status = 1
        try:
            for number, path in ((1, self.output), (2, self.errors)):
                os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
            # pytest keeps what goes to its own.
            sys.stdout, sys.stderr = os.fdopen(1, "w", buffering=1), os.fdopen(2, "w", buffering=1)
            torch.set_num_threads(1)
            work()
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(status)

    def said(self) -> tuple[str, str]:
        """What it has printed, and what it has complained of."""
        return self.output.read_text(), self.errors.read_text()

    def poll(self) -> int | None:
        """The exit status, or null while it runs."""
        if self.status is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self.status = os.waitstatus_to_exitcode(status) if pid else None
        return self.status

    def kill(self) -> None:
        """End it at once, if it still runs, and wait for that."""
        if self.poll() is None:
            os.kill(self.pid, signal.SIGKILL)
            self.status = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])


@pytest.fixture(scope="session")
def fork() -> Callable[..., Forked]:
    """``fork(work, output)``: see ``Forked``."""
    return Forked
