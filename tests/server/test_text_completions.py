"""`/v1/completions` and the token endpoints with the real client."""

import openai
import pytest

GIVEN = {"model": "tale-20m", "prompt": "Once upon a time", "seed": 5, "temperature": 0.9, "max_tokens": 24}


def test_whole_and_stream_agree(client):
    whole = client.completions.create(**GIVEN)
    assert whole.object == "text_completion" and whole.choices[0].finish_reason == "length"
    chunks = list(client.completions.create(**GIVEN, stream=True, stream_options={"include_usage": True}))
    assert "".join(choice.text for chunk in chunks for choice in chunk.choices) == whole.choices[0].text
    assert chunks[-1].usage.model_dump() == whole.usage.model_dump()


def test_prompts_side_by_side_are_as_alone(client, server):
    with server.client() as http:
        ids = http.post("/v1/token/encode", json={"text": "The little fox"}).json()["tokens"]
    alone = [
        client.completions.create(**(GIVEN | {"prompt": prompt, "n": 2}))
        for prompt in ("Once upon a time", "The little fox")
    ]
    texts = [choice.text for answer in alone for choice in answer.choices]
    together = client.completions.create(
        **(GIVEN | {"prompt": ["Once upon a time", "The little fox"], "n": 2})
    )
    assert [choice.text for choice in together.choices] == texts
    assert [choice.index for choice in together.choices] == [0, 1, 2, 3]
    assert together.usage.prompt_tokens == sum(answer.usage.prompt_tokens for answer in alone)
    by_ids = client.completions.create(**(GIVEN | {"prompt": ids, "n": 2}))
    assert [choice.text for choice in by_ids.choices] == texts[2:]


def test_echo(client):
    plain = client.completions.create(**GIVEN).choices[0].text
    assert client.completions.create(**GIVEN, echo=True).choices[0].text == GIVEN["prompt"] + plain
    chunks = client.completions.create(**GIVEN, echo=True, stream=True)
    assert "".join(choice.text for chunk in chunks for choice in chunk.choices) == GIVEN["prompt"] + plain


def test_logprobs(client):
    logprobs = client.completions.create(**GIVEN, logprobs=2).choices[0].logprobs
    assert len(logprobs.tokens) == len(logprobs.token_logprobs) == len(logprobs.top_logprobs) == 24
    assert all(len(top) == 2 for top in logprobs.top_logprobs)
    ends = [offset + len(token) for offset, token in zip(logprobs.text_offset, logprobs.tokens, strict=True)]
    assert logprobs.text_offset == [0, *ends[:-1]]


def test_default_length(client):
    given = {name: value for name, value in GIVEN.items() if name != "max_tokens"}
    assert client.completions.create(**given, extra_body={"ignore_eos": True}).usage.completion_tokens == 16


@pytest.mark.parametrize(
    ("extra", "param"),
    [
        ({"prompt": []}, "prompt"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": [1, "a"]}, "prompt"),
        ({"prompt": [99999]}, "prompt"),
        ({"suffix": "x"}, "suffix"),
        ({"best_of": 3}, "best_of"),
        ({"echo": True, "logprobs": 1, "stream": True}, "echo"),
        ({"logprobs": 21}, "logprobs"),
    ],
)
def test_refusals(client, extra, param):
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(**GIVEN, extra_body=extra)
    assert param in f"{caught.value.body['param']} {caught.value.body['message']}"


def test_tokens_there_and_back(server):
    text = "Größe, 龙 and a dragon 🐉<|im_end|>"
    with server.client() as http:
        encoded = http.post("/v1/token/encode", json={"text": text}).json()
        assert encoded["length"] == len(encoded["tokens"])
        assert http.post("/v1/token/decode", json={"tokens": encoded["tokens"]}).json() == {"text": text}
        wrong = http.post("/v1/token/decode", json={"tokens": [10**6]})
        assert wrong.status_code == 400 and wrong.json()["error"]["param"].startswith("tokens[0]")
