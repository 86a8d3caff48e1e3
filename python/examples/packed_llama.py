"""Trains a small Llama on packed documents, with each sequence sharded over all ranks.

    torchrun --nproc-per-node 2 python/examples/packed_llama.py

The model is one of transformers, unchanged but for `attn_implementation`. Every rank reads the same batch and keeps its own rows
of it: `Batch` finds the documents, plans who computes what, and shifts the labels before rows are dealt out. No logits are
gathered. Needs torch and transformers. Ranks have a GPU each where there are as many, and are on the CPU where there are not.
Random words stand for data, so the loss falls only as far as a batch can be learnt by heart.
"""

from __future__ import annotations

import os

import torch
import torch.distributed as dist
import transformers

import counterpoint as cp
import counterpoint.transformers

LENGTHS = [180, 44, 300, 100, 400]  # of the documents that are packed into one sequence
STEPS = 8


def batch_of(step: int, device: torch.device) -> dict[str, torch.Tensor]:
    """Packed as transformers packs: positions begin again with every document."""
    noise = torch.Generator().manual_seed(step % 2)
    ids = torch.randint(3, 500, (1, sum(LENGTHS)), generator=noise)
    positions = torch.cat([torch.arange(length) for length in LENGTHS])[None]
    return {"input_ids": ids.to(device), "position_ids": positions.to(device), "labels": ids.to(device)}


def main() -> None:
    local_rank, local_ranks = (int(os.environ[name]) for name in ("LOCAL_RANK", "LOCAL_WORLD_SIZE"))  # set by torchrun
    device = torch.device("cuda", local_rank) if torch.cuda.device_count() >= local_ranks else torch.device("cpu")
    if on_gpu := device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if on_gpu else "gloo")
    # Of the process group's ranks, through its store; nothing else of torch.distributed is used.
    group = cp.Group(device=device)
    counterpoint.transformers.register()
    torch.manual_seed(0)  # the same parameters on all ranks
    config = transformers.LlamaConfig(
        vocab_size=500, hidden_size=64, intermediate_size=160, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2
    )
    dtype = torch.bfloat16 if on_gpu else torch.float32
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="counterpoint", dtype=dtype).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    # Where this rank fails, the others hear why.
    with group.failing_together():
        for step in range(STEPS):
            batch = cp.Batch.prepare(batch_of(step, device), group, model.config)
            if step == 0 and group.rank == 0:
                print(batch.plan, "rows of ranks:", batch.plan.sizes)
            cp.Batch.prefetch(batch_of(step + 1, device), group, model.config)  # planned while this step computes
            logits = model(**{name: value for name, value in batch.inputs.items() if "labels" not in name}).logits
            loss = batch.loss(logits)  # this rank's share: added up over ranks, it is the mean over the batch
            optimizer.zero_grad()
            loss.backward()
            for parameter in model.parameters():
                dist.all_reduce(parameter.grad)
            optimizer.step()
            dist.all_reduce(total := loss.detach())
            if group.rank == 0:
                print(f"step {step}: loss {total:.4f}")
    group.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
