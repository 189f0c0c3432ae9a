"""A tied model under a schedule of torch.distributed.pipelining, trained as one copy.

torchrun --nproc-per-node 2 examples/torch_pipelining.py
"""

import copy
from collections import OrderedDict

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

import piper_owner as po  # <-- piper-owner
from piper_owner.frontends.torch_pipelining import attach  # <-- piper-owner

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
    stage = PipelineStage(module, rank, 2, torch.device("cpu"))
    schedule = Schedule1F1B(stage, n_microbatches=8, loss_fn=nn.functional.cross_entropy)
    own = po.assign_owners(stage, po.find_ties(model))  # <-- piper-owner
    opt = po.OwnerOptimizer(module.parameters(), torch.optim.AdamW, ownership=own, lr=0.01)  # <-- piper-owner
    attach(schedule, opt)  # <-- piper-owner
    for step in range(5):
        losses = []
        if rank == 0:
            schedule.step(ids)
        else:
            schedule.step(target=labels, losses=losses)
        opt.clip_grad_norm_(0.1)  # <-- piper-owner
        opt.step()
        opt.zero_grad()

        expected = nn.functional.cross_entropy(alone(ids), labels)
        expected.backward()
        nn.utils.clip_grad_norm_(alone.parameters(), 0.1)
        reference.step()
        reference.zero_grad()
        if rank == 1:
            loss = torch.stack(losses).mean()
            print(f"step {step}: loss {loss:.12f}, in one process {expected:.12f}", flush=True)
            assert (loss - expected).abs() < 1e-10
    own.check()  # <-- piper-owner
    if rank == 0:
        print(f"every loss equal to 1e-10, every copy bit for bit\n{own.describe()}", flush=True)
    own.close()  # <-- piper-owner
    dist.destroy_process_group()
