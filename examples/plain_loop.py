"""A tied model over two ranks in a hand-written loop, with gradient accumulation, trained as one copy.

torchrun --nproc-per-node 2 examples/plain_loop.py
"""

import copy
from collections import OrderedDict

import torch
import torch.distributed as dist
from torch import nn

import piper_owner as po  # <-- piper-owner

if __name__ == "__main__":
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    embed, head = nn.Embedding(500, 64), nn.Linear(64, 500, bias=False)
    embed.weight = head.weight  # one parameter
    hidden = nn.Sequential(nn.Linear(64, 64), nn.Tanh())
    model = nn.Sequential(OrderedDict(embed=embed, hidden=hidden, head=head)).double()
    alone = copy.deepcopy(model)  # trained beside it in one process, to compare
    reference = torch.optim.AdamW(alone.parameters(), lr=0.01)
    ids, labels = torch.randint(500, (2, 256))  # predict the next token

    module = model[:2] if rank == 0 else model[2:]
    own = po.assign_owners(module, po.find_ties(model))  # <-- piper-owner
    opt = po.OwnerOptimizer(module.parameters(), torch.optim.AdamW, ownership=own, lr=0.01)  # <-- piper-owner
    for step in range(5):
        total = 0.0
        for some_ids, some_labels in zip(ids.chunk(8), labels.chunk(8), strict=True):
            buffer = torch.empty(len(some_ids), 64, dtype=torch.float64)
            if rank == 0:
                rows = module(some_ids)
                dist.send(rows.detach(), dst=1)
                dist.recv(buffer, src=1)
                rows.backward(buffer)
            else:
                dist.recv(buffer, src=0)
                loss = nn.functional.cross_entropy(module(buffer.requires_grad_()), some_labels) / 8
                loss.backward()
                dist.send(buffer.grad, dst=0)
                total += loss.item()
        opt.step()
        opt.zero_grad()

        expected = nn.functional.cross_entropy(alone(ids), labels)
        expected.backward()
        reference.step()
        reference.zero_grad()
        if rank == 1:
            print(f"step {step}: loss {total:.12f}, in one process {expected:.12f}", flush=True)
            assert abs(total - expected) < 1e-10
    own.check()  # <-- piper-owner
    if rank == 0:
        print(f"every loss equal to 1e-10, every copy bit for bit\n{own.describe()}", flush=True)
    own.close()  # <-- piper-owner
    dist.destroy_process_group()
