"""A tied Llama over two pipeline stages, trained as one copy.

torchrun --nproc-per-node 2 examples/huggingface.py
"""

import copy

import torch
import torch.distributed as dist
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from transformers import AutoModelForCausalLM, LlamaConfig

import piper_owner as po  # <-- piper-owner
from piper_owner.frontends import huggingface  # <-- piper-owner

SIZES = {"vocab_size": 1000, "hidden_size": 32, "intermediate_size": 64, "max_position_embeddings": 64}
CONFIG = LlamaConfig(**SIZES, num_hidden_layers=4, num_attention_heads=4, tie_word_embeddings=True)


def loss_of(logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


def main() -> None:
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(CONFIG)
    alone = copy.deepcopy(model)
    module = huggingface.split(model, world_size)[rank]  # <-- piper-owner
    stage = PipelineStage(module, rank, world_size, torch.device("cpu"))
    schedule = Schedule1F1B(stage, n_microbatches=4, loss_fn=loss_of)
    own = po.assign_owners(stage, huggingface.find_ties(model))  # <-- piper-owner
    optimizer = po.OwnerOptimizer(module.parameters(), torch.optim.AdamW, ownership=own)  # <-- piper-owner
    reference = torch.optim.AdamW(alone.parameters())
    ids = torch.randint(0, CONFIG.vocab_size, (8, 32))
    for step in range(5):
        losses = []
        schedule.step(*([ids] if rank == 0 else []), target=ids, losses=losses)
        optimizer.step()
        optimizer.zero_grad()
        expected = loss_of(alone(ids).logits, ids)
        expected.backward()
        reference.step()
        reference.zero_grad()
        if rank == world_size - 1:
            loss = torch.stack(losses).mean().item()
            assert abs(loss - expected.item()) < 1e-5
            print(f"step {step}: loss {loss:.6f}, in one process {expected.item():.6f}", flush=True)
    own.check()  # <-- piper-owner
    if rank == 0:
        print(f"every loss equal to 1e-5, every copy bit for bit\n{own.describe()}", flush=True)
    own.close()  # <-- piper-owner
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
