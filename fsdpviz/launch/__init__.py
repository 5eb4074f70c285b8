"""torchrun as a subprocess, and the files are its process tree: launcher > supervisor > torchrun > worker.

Only `torchrun` and `worker`, which run in processes of their own, import torch.
"""
