"""Checkpoints on disk: where they are, what their tensors are called, and how to read them.

Knows files, names and shapes; nothing of what a model computes with them.
"""
