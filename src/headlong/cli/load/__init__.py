"""The load generator behind `headlong bench serve`: it speaks HTTP to any server and imports nothing of ours that runs
models."""
