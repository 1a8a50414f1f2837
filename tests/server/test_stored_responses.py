"""Responses that go on from stored ones, with the real `openai` client over real sockets."""

import openai
import pytest

from headlong.server.keys import hash_key
from support.serving import RunningServer

GIVEN = {"model": "tale-20m", "temperature": 0.8, "max_output_tokens": 24, "extra_body": {"seed": 7}}
STORY, MORE = "Write a short story about a shy dragon.", "Give the dragon a name."


@pytest.fixture(scope="module")
def client(server):
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)


def test_going_on_is_sending_everything(client):
    first = client.responses.create(**GIVEN, input=STORY, instructions="Be kind.")
    assert first.store is True
    second = client.responses.create(**GIVEN, input=MORE, previous_response_id=first.id)
    assert second.previous_response_id == first.id
    said = {"role": "assistant", "content": first.output_text}
    whole = [{"role": "user", "content": STORY}, said, {"role": "user", "content": MORE}]
    assert second.output_text == client.responses.create(**GIVEN, input=whole, store=False).output_text
    third = client.responses.create(**GIVEN, input="Why?", previous_response_id=second.id)
    whole += [{"role": "assistant", "content": second.output_text}, {"role": "user", "content": "Why?"}]
    assert third.output_text == client.responses.create(**GIVEN, input=whole, store=False).output_text


def test_streams_are_stored_and_read(client):
    *_, last = client.responses.create(**GIVEN, input=STORY, stream=True)
    stored = client.responses.retrieve(last.response.id)
    assert stored.output_text == last.response.output_text and stored.to_dict() == last.response.to_dict()
    second = client.responses.create(**GIVEN, input=MORE, previous_response_id=stored.id)
    items = client.responses.input_items.list(second.id, order="asc")
    texts = [item.content if isinstance(item.content, str) else item.content[0].text for item in items]
    assert texts == [STORY, stored.output_text, MORE]
    backwards = client.responses.input_items.list(second.id, limit=2)
    assert [item.content for item in backwards.data] == texts[:0:-1] and backwards.has_more


def test_deleted_and_unwanted_ones_are_gone(client):
    kept = client.responses.create(**GIVEN, input=STORY)
    client.responses.delete(kept.id)
    unwanted = client.responses.create(**GIVEN, input=STORY, store=False)
    assert unwanted.store is False
    for gone in (kept.id, unwanted.id, "resp_of_nobody"):
        with pytest.raises(openai.NotFoundError):
            client.responses.retrieve(gone)
        with pytest.raises(openai.BadRequestError, match="previous_response_id") as caught:
            client.responses.create(**GIVEN, input=MORE, previous_response_id=gone)
        assert caught.value.code == "previous_response_not_found"


def test_bounds_and_owners():
    keys = ("key-of-ann", "key-of-bob")
    room = 12_000
    with RunningServer(api_keys=tuple(map(hash_key, keys)), response_store_bytes=room) as running:
        ann, bob = (openai.OpenAI(base_url=f"{running.url}/v1", api_key=key, max_retries=0) for key in keys)
        first = ann.responses.create(**GIVEN, input=STORY)
        assert ann.responses.retrieve(first.id).id == first.id
        with pytest.raises(openai.NotFoundError):
            bob.responses.retrieve(first.id)
        with pytest.raises(openai.BadRequestError):
            bob.responses.create(**GIVEN, input=MORE, previous_response_id=first.id)
        for _ in range(8):
            ann.responses.create(**GIVEN, input=STORY)
        assert running.server.responses._bytes <= room
        with pytest.raises(openai.NotFoundError):
            ann.responses.retrieve(first.id)


def test_a_server_that_stores_nothing_says_so():
    with RunningServer(response_store_bytes=0) as running:
        client = openai.OpenAI(base_url=f"{running.url}/v1", api_key="none", max_retries=0)
        answer = client.responses.create(**GIVEN, input=STORY)
        assert answer.store is False
        with pytest.raises(openai.BadRequestError, match="nothing is stored here"):
            client.responses.create(**GIVEN, input=MORE, previous_response_id=answer.id)
