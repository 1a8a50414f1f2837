"""An answer that follows a schema, exactly: the grammar holds every token, drafted or not."""

import os

import openai
import pydantic

URL = os.environ.get("HEADLONG_URL", "http://127.0.0.1:8000")


class Character(pydantic.BaseModel):
    """What is asked for."""

    name: str = pydantic.Field(max_length=20)
    animal: str = pydantic.Field(max_length=20)
    age: int = pydantic.Field(ge=1, le=200)
    brave: bool


def main() -> None:
    client = openai.OpenAI(base_url=f"{URL}/v1", api_key=os.environ.get("HEADLONG_KEY", "none"))
    answer = client.chat.completions.parse(
        model=client.models.list().data[0].id,
        messages=[{"role": "user", "content": "Invent a character for a story."}],
        response_format=Character,
        seed=1,
        max_tokens=200,
    )
    character = answer.choices[0].message.parsed
    assert character is not None
    print(
        f"{character.name}, a {'brave' if character.brave else 'shy'} {character.animal} of {character.age}"
    )


if __name__ == "__main__":
    main()
