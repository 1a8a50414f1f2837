"""Where the clients are."""

from pathlib import Path

HERE = Path(__file__).parent
INSTALLED = HERE.parents[1] / ".clients"
"""What `make clients` installs."""
