"""A conversation of two turns, streamed, with what drafting did after each."""

import os

import openai

URL = os.environ.get("HEADLONG_URL", "http://127.0.0.1:8000")
QUESTIONS = ("Write a short story about a shy dragon.", "Give the dragon a name.")


def main() -> None:
    client = openai.OpenAI(base_url=f"{URL}/v1", api_key=os.environ.get("HEADLONG_KEY", "none"))
    model = client.models.list().data[0].id
    messages = []
    for question in QUESTIONS:
        messages.append({"role": "user", "content": question})
        stream = client.chat.completions.create(
            model=model,
            messages=messages,
            max_tokens=120,
            seed=7,
            stream=True,
            stream_options={"include_usage": True},
        )
        print(f"> {question}\n")
        answer = ""
        for chunk in stream:
            for choice in chunk.choices:
                answer += choice.delta.content or ""
                print(choice.delta.content or "", end="", flush=True)
            if chunk.usage:
                details = chunk.usage.completion_tokens_details
                print(
                    f"\n\n({chunk.usage.completion_tokens} tokens, of which {details.accepted_prediction_tokens} "
                    "were drafted)\n"
                )
        messages.append({"role": "assistant", "content": answer})


if __name__ == "__main__":
    main()
