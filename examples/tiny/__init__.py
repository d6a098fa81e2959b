"""A small DeepSeek-V3.2 (MLA, DSA, MoE, MTP) in plain PyTorch, and what is needed to train it."""
