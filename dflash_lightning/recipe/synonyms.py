"""What other programs call our settings, so that a key of theirs is answered with ours."""

from __future__ import annotations

from dataclasses import replace

from dflash_lightning.recipe.faults import Fault, close_match

# Our dotted key, and the words that people write for it, in lower case with underscores.
_WORDS = {
    "target": "model base_model target_model model_name model_path model_id model_name_or_path llm",
    "run_dir": "out out_dir output output_dir output_path save_dir log_dir",
    "init_from": "checkpoint ckpt checkpoint_path ckpt_path pretrained pretrained_path",
    "draft_vocabulary": "vocab vocabulary vocab_size draft_vocab draft_vocab_size",
    "data.train": "dataset datasets dataset_path data_path data_file train train_data train_file train_path",
    "data.max_length": "max_length max_len maximum_length seq_len seq_length sequence_length max_seq_len "
    "max_seq_length context_length",
    "data.rows_per_batch": "batch batch_size train_batch_size micro_batch_size per_device_train_batch_size "
    "per_device_batch_size rows_per_batch bs",
    "data.num_workers": "workers num_workers dataloader_num_workers",
    "data.limit": "max_samples num_samples max_rows max_train_samples",
    "callbacks.speculative_eval.prompts": "prompts eval_data eval_file eval_prompts eval_dataset validation val "
    "val_data val_file test_data held_out",
    "optim.lr": "lr learning_rate base_lr max_lr peak_lr",
    "optim.weight_decay": "wd weight_decay",
    "optim.warmup_steps": "warmup warmup_steps num_warmup_steps",
    "optim.warmup_fraction": "warmup_ratio warmup_fraction",
    "optim.final_fraction": "min_lr min_lr_ratio final_lr",
    "trainer.max_epochs": "epoch epochs num_epochs n_epochs num_train_epochs max_epochs",
    "trainer.max_steps": "steps num_steps n_steps max_steps max_train_steps total_steps iterations",
    "trainer.accumulate_grad_batches": "accumulate accumulation accumulation_steps grad_accum "
    "gradient_accumulation_steps accumulate_grad_batches",
    "trainer.gradient_clip_val": "clip grad_clip clip_grad clip_grad_norm max_grad_norm gradient_clip_val",
    "trainer.devices": "devices gpus num_gpus n_gpus num_devices",
    "trainer.accelerator": "device accelerator",
    "trainer.precision": "precision dtype bf16 fp16 mixed_precision",
    "drafter.num_layers": "layers n_layers num_layers num_hidden_layers depth draft_layers num_draft_layers",
    "block.block_size": "block_size num_speculative_tokens num_spec_tokens draft_length",
    "block.num_anchors": "anchors num_anchors",
    "conditioning.num_features": "features num_features target_layers num_target_layers",
    "decoding.temperature": "temperature",
    "decoding.max_new_tokens": "max_new_tokens max_tokens",
}
_OURS = {word: key for key, words in _WORDS.items() for word in words.split()}
# Parts of these have names of their own, so that a word says less there.
_NAMED = ("loss", "callbacks")
_UNKNOWN = "unknown key"
_SHORT = 5  # letters of words that too many others are near to


def meant(word: str) -> str | None:
    """Our dotted key for what somebody calls ``word`` (``--batch-size``, ``optim.learning_rate``); null: unknown."""
    return _OURS.get(_plain(word))


def _plain(word: str) -> str:
    return word.rpartition(".")[2].strip("-").replace("-", "_").lower()


def with_meant(fault: Fault) -> Fault:
    """An unknown key whose word belongs to another setting names that one."""
    if not fault.what.startswith(_UNKNOWN) or fault.where.partition(".")[0] in _NAMED:
        return fault
    ours = meant(fault.where)
    if ours is None and fault.do.startswith("Allowed"):  # no setting beside it is near, so try slips of the pen
        slip = close_match(_plain(fault.where), [word for word in _OURS if len(word) > _SHORT])
        ours = None if slip is None else _OURS[slip]
    if ours is None:
        return fault
    return replace(fault, do=f"Did you mean {ours!r}? {fault.do[fault.do.find('Allowed: ') :]}")
