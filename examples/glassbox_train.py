"""Trains on every rank:  torchrun --nproc-per-node=2 examples/glassbox_train.py"""

import os

import torch
import torch.distributed as dist
from torch import nn

from fsdpviz.engine.glassbox import ShardedModel, ShardedOptimizer, by_rule

dist.init_process_group()
device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if torch.cuda.is_available() else torch.device("cpu")
blocks = [nn.Sequential(nn.Linear(64, 64), nn.GELU()) for _ in range(4)]
module = nn.Sequential(nn.Linear(16, 64), *blocks, nn.Linear(64, 1)).to(device)
is_block = by_rule(lambda name, child: isinstance(child, nn.Sequential))
model = ShardedModel(module, sharding_degree=dist.get_world_size(), units=is_block)
optimizer = ShardedOptimizer(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
for step in range(60):
    inputs = torch.randn(32, 16, generator=torch.Generator().manual_seed(step * 1000 + dist.get_rank())).to(device)
    loss = nn.functional.mse_loss(model(inputs), inputs.sum(1, keepdim=True))
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    if dist.get_rank() == 0 and step % 20 == 19:
        print(f"step {step + 1}: loss {loss.item():.4f}")
weights = model.full_state_dict()  # on every rank; the names and shapes of ``module``
model.close()
dist.destroy_process_group()
