"""An agent: Anthropic's tool runner calls the model and its tools in turns, over /v1/messages."""

import os

import anthropic

URL = os.environ.get("HEADLONG_URL", "http://127.0.0.1:8000")


@anthropic.beta_tool
def count_letters(word: str) -> str:
    """Counts the letters of a word.

    Args:
        word: The word.
    """
    print(f"count_letters({word!r})")
    return f"{word} has {len(word)} letters."


def main() -> None:
    client = anthropic.Anthropic(base_url=URL, api_key=os.environ.get("HEADLONG_KEY", "none"))
    runner = client.beta.messages.tool_runner(
        model=client.models.list().data[0].id,
        messages=[{"role": "user", "content": "How many letters has the word dragon?"}],
        tools=[count_letters],
        max_tokens=200,
        max_iterations=3,
    )
    for message in runner:
        for block in message.content:
            if block.type == "text":
                print(block.text)


if __name__ == "__main__":
    main()
