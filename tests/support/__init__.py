"""What several test packages share: tiny checkpoints and a driver for single steps."""
