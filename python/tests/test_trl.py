"""TRL's SFTTrainer with `TrainerMixin`: on ranks the losses and the parameters of TRL alone. Skipped where TRL is not installed.

TRL and the data sets that it needs are 300 MB, which the package's own tests do not install: `pip install trl` in addition.
"""

from __future__ import annotations

import os
from typing import Any

import pytest

import counterpoint as cp

torch = pytest.importorskip("torch")
pytest.importorskip("trl")
transformers = pytest.importorskip("transformers", minversion="5")
import torch.distributed as dist  # noqa: E402
from datasets import Dataset  # noqa: E402
from ranks import Ranks  # noqa: E402
from test_transformers import made  # noqa: E402
from tokenizers import Tokenizer, models, pre_tokenizers  # noqa: E402
from trl import SFTConfig, SFTTrainer  # noqa: E402

from counterpoint.transformers import TrainerMixin  # noqa: E402


class Trainer(TrainerMixin, SFTTrainer):
    """What a user writes."""


def tokenizer() -> Any:
    words = Tokenizer(models.WordLevel({f"w{number}": number for number in range(61)}, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    return transformers.PreTrainedTokenizerFast(tokenizer_object=words, unk_token="w0", pad_token="w1", eos_token="w2")


def documents() -> Any:
    noise = torch.Generator().manual_seed(5)
    lengths = [5 + (7 * number) % 19 for number in range(32)]
    return Dataset.from_list([{"input_ids": torch.randint(3, 61, (length,), generator=noise).tolist()} for length in lengths])


def arguments(folder: str, **how: Any) -> Any:
    return SFTConfig(
        output_dir=folder,
        max_steps=2,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        learning_rate=0.05,
        optim="sgd",
        lr_scheduler_type="constant",
        max_grad_norm=0.0,
        report_to=[],
        save_strategy="no",
        logging_steps=1,
        disable_tqdm=True,
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        **how,
    )


HOW: dict[str, dict[str, Any]] = {
    "padded": {},
    "packed": {"packing": True, "max_length": 64},
    "padding-free": {"padding_free": True, "max_length": None},
}


def trained(kind: type, attention: str, folder: str, how: str, **more: Any) -> tuple[list[float], list[Any]]:
    model = made("llama").float()
    model.set_attn_implementation(attention)
    given = arguments(folder, **HOW[how])
    trainer = kind(model=model, args=given, train_dataset=documents(), processing_class=tokenizer(), **more)
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    return losses, [parameter.detach().clone() for parameter in model.parameters()]


def on_ranks(rank: int, folder: str, how: str) -> tuple[list[float], list[Any]]:
    os.environ["ACCELERATE_USE_CPU"] = "1"
    return trained(Trainer, "counterpoint", f"{folder}/{rank}", how, cp_group=dist.group.WORLD, plan={"chunk": 4})


@pytest.mark.parametrize("how", list(HOW))
def test_sft_on_ranks(tmp_path, how: str) -> None:
    # Of TRL alone eager attention would mix packed documents.
    attention = "eager" if how == "padded" else "counterpoint"
    wanted, parameters = trained(SFTTrainer, attention, str(tmp_path / "alone"), how)
    with Ranks(2) as pool:
        found = pool.run(on_ranks, str(tmp_path), how)
    for losses, own in found:
        assert losses == pytest.approx(wanted, rel=1e-5)
        for one, other in zip(own, parameters, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)


def test_one_process(tmp_path) -> None:
    wanted, _ = trained(SFTTrainer, "eager", str(tmp_path / "alone"), "padded")
    found, _ = trained(Trainer, "counterpoint", str(tmp_path / "ours"), "padded", cp_group=cp.LocalGroup(1))
    assert found == pytest.approx(wanted, rel=1e-5)
