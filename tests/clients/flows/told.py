"""What the flows share: where the server is, and how they tell what came of it."""

import json
import os

URL = os.environ["HEADLONG_URL"]
OPENAI_URL = f"{URL}/v1"
MODEL = "tale-20m"
ASK = "Look at the sea, then tell me a story."


def tell(**facts) -> None:
    """Prints the last line, which the test reads."""
    print(json.dumps(facts))
