"""What users of vLLM, llama.cpp's server and tabbyAPI send and call besides OpenAI's API, with a real engine."""

import base64
import struct

import httpx
import openai
import pytest

from headlong.checkpoint.source import EMBEDDED
from headlong.text.codec import TextCodec
from headlong.text.tokenizer import Tokenizer
from support.scripted import ScriptedEngine, ScriptedEngines
from support.serving import RunningServer
from support.vocabularies import with_added_tokens

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
USER = [{"role": "user", "content": "Tell me a story about a dog."}]
GREEDY = {"temperature": 0, "repetition_penalty": 1.0, "max_tokens": 24}


@pytest.fixture(scope="module")
def running():
    """With a prefix cache: what is asked of a prompt must not depend on it."""
    with RunningServer(
        draft_tokens=3, chunk_tokens=128, max_context=1024, aliases=["gpt-4o=tale-20m", "o3 = gone"]
    ) as server:
        yield server


@pytest.fixture(scope="module")
def http(running):
    with running.client() as client:
        yield client


@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer.from_folder(EMBEDDED)


def good(http: httpx.Client, path: str, **body) -> dict:
    answer = http.post(path, json=body)
    assert answer.status_code == 200, answer.text
    assert "x-headlong-unknown" not in answer.headers
    return answer.json()


def refused(http: httpx.Client, path: str, **body) -> str:
    answer = http.post(path, json=body)
    assert answer.status_code == 400, answer.text
    return answer.json()["error"]["message"]


def content(http: httpx.Client, **more) -> str:
    return good(http, CHAT, **{"messages": USER} | GREEDY | more)["choices"][0]["message"]["content"]


SAME = [
    ({"guided_regex": "[0-9]{3}"}, {"structured_outputs": {"regex": "[0-9]{3}"}}),
    ({"guided_choice": ["yes", "no"]}, {"structured_outputs": {"choice": ["yes", "no"]}}),
    (
        {"guided_json": {"type": "array", "items": {"type": "boolean"}, "maxItems": 2}},
        {"structured_outputs": {"json": {"type": "array", "items": {"type": "boolean"}, "maxItems": 2}}},
    ),
    ({"guided_grammar": 'start: "a" | "b"'}, {"structured_outputs": {"grammar": 'start: "a" | "b"'}}),
    ({"grammar": 'root ::= "left" | "right"'}, {"guided_choice": ["left", "right"]}),
    ({"n_predict": 5, "max_tokens": None}, {"max_tokens": 5}),
    ({"n_predict": -1, "max_tokens": None, "stop": ["."]}, {"max_tokens": 400, "stop": ["."]}),
    ({"repeat_penalty": 1.5}, {"repetition_penalty": 1.5}),
    ({"banned_tokens": [269, 300]}, {"bad_token_ids": [269, 300]}),
    ({"min_new_tokens": 3, "stop": ["O"]}, {"min_tokens": 3, "stop": ["O"]}),
    ({"samplers": ["penalties", "dry", "temperature", "top_k", "top_p", "min_p"]}, {}),
    ({"skip_special_tokens": True, "cache_prompt": False, "id_slot": -1, "n_keep": 0}, {}),
]


@pytest.mark.parametrize(("theirs", "ours"), SAME)
def test_other_servers_names(http, theirs, ours):
    if "repeat_penalty" in theirs or "repetition_penalty" in ours:
        theirs = {"repetition_penalty": None} | theirs
    assert content(http, **theirs) == content(http, **ours)


def test_n_probs(http):
    (one,) = good(http, CHAT, messages=USER, n_probs=3, n_predict=1)["choices"]
    assert len(one["logprobs"]["content"][0]["top_logprobs"]) == 3
    (one,) = good(http, TEXT, prompt="Once", n_probs=2, n_predict=1)["choices"]
    assert len(one["logprobs"]["top_logprobs"][0]) == 2


def test_errors_tell_the_name_that_was_sent(http):
    assert refused(http, CHAT, messages=USER, n_predict=0).startswith(
        "n_predict: must be a whole number from 1"
    )
    assert refused(http, CHAT, messages=USER, guided_regex="[0-9").startswith("guided_regex: ")
    assert refused(http, CHAT, messages=USER, n_predict=4, max_tokens=5).startswith(
        "n_predict: contradicts max_t"
    )
    told = refused(http, CHAT, messages=USER, guided_regex="a", guided_choice=["a"])
    assert told.startswith("guided_choice: contradicts guided_regex")
    told = refused(http, CHAT, messages=USER, guided_regexx="a")
    assert told == "guided_regexx: is not known; did you mean guided_regex?"
    told = refused(http, CHAT, messages=USER, samplers=["top_k"])
    assert told.startswith("samplers: ") and "temperature, top_k, top_p" in told


BOUNDS = [
    ({"temperature": 200}, "temperature: must be a number from 0 to 100"),
    ({"top_p": 0}, "top_p: must be a number above 0 and at most 1"),
    ({"n": 0}, "n: must be a whole number from 1 to 128"),
    ({"top_logprobs": 50, "logprobs": True}, "top_logprobs: must be a whole number from 0 to 20"),
    (
        {"speculative": {"mtp": 99}},
        "speculative.mtp: must be 'auto', 'on', 'off' or a whole number from 0 to 8, ",
    ),
    ({"speculative": {"mtp": -1}}, "speculative.mtp: must be 'auto', 'on', 'off' or a whole number"),
]


@pytest.mark.parametrize(("body", "told"), BOUNDS)
def test_bounds_are_named(http, body, told):
    assert refused(http, CHAT, messages=USER, **body).startswith(told)


class TestBannedStrings:
    @pytest.mark.parametrize("seed", range(2))
    def test_they_never_occur(self, http, seed):
        """Sampled and greedy, the same with drafting on and off, whatever tokens cut the strings."""
        plain = content(http, temperature=1.0, seed=seed, max_tokens=40)
        words = [word for word in plain.split() if len(word) > 2]
        banned = [words[1], words[4].upper(), plain[10:13], plain[30:34], " "]
        for strings in (banned[:1], banned[:4], banned):
            texts = {
                content(
                    http, temperature=1.0, seed=seed, max_tokens=40, banned_strings=strings, speculative=how
                )
                for how in ({"mtp": "off"}, {"mtp": 2}, {"mtp": "on"})
            }
            assert len(texts) == 1
            (text,) = texts
            assert text and all(one.lower() not in text.lower() for one in strings)

    def test_as_bad_words_and_refused_with_a_form(self, http):
        assert content(http, bad_words=["dog"]) == content(http, banned_strings=["dog"]) != content(http)
        told = refused(http, CHAT, messages=USER, banned_strings=["a"], guided_regex="[abc]+")
        assert told.startswith("banned_strings cannot be combined")
        assert refused(http, CHAT, messages=USER, banned_strings=["x" * 900] * 5).startswith("banned_strings")


class TestContinued:
    def test_the_answer_goes_on(self, http):
        """Whole answers: what follows a beginning of one is its rest."""
        whole = content(http, max_tokens=30)
        begun, rest = whole[: len(whole) // 2], whole[len(whole) // 2 :]
        begun = begun[: begun.rindex(" ")]
        rest = whole[len(begun) :]
        messages = [*USER, {"role": "assistant", "content": begun}]
        more = {"continue_final_message": True, "add_generation_prompt": False}
        assert content(http, messages=messages, **more).startswith(rest[:20])
        messages[-1]["prefix"] = True
        assert content(http, messages=messages).startswith(rest[:20])

    def test_only_the_assistants_last(self, http):
        assert refused(http, CHAT, messages=USER, continue_final_message=True).startswith(
            "continue_final_message"
        )
        told = refused(http, CHAT, messages=[{**USER[0], "prefix": True}, *USER])
        assert told.startswith("messages[0].prefix")
        messages = [*USER, {"role": "assistant", "content": "Once"}]
        told = refused(http, CHAT, messages=messages, continue_final_message=True, add_generation_prompt=True)
        assert told.startswith("add_generation_prompt")

    def test_no_turn_is_opened(self, http):
        opened = good(http, "/tokenize", messages=USER)["tokens"]
        closed = good(http, "/tokenize", messages=USER, add_generation_prompt=False)["tokens"]
        assert len(closed) < len(opened) and opened[: len(closed)] == closed
        usage = good(http, CHAT, messages=USER, add_generation_prompt=False, max_tokens=1)["usage"]
        assert usage["prompt_tokens"] == len(closed)


def test_an_open_thought_is_continued(tool_server):
    """What the client began to think goes on as thinking, until it is closed."""
    body = {
        "messages": [*USER, {"role": "assistant", "content": "<think>\nA dog"}],
        "continue_final_message": True,
    }
    with tool_server.client() as http:
        message = good(http, CHAT, **body, **GREEDY)["choices"][0]["message"]
        assert message["reasoning_content"] and not message["content"]
        body["messages"][-1]["content"] += " it is.\n</think>\n\nOnce"
        message = good(http, CHAT, **body, **GREEDY)["choices"][0]["message"]
        assert message["content"] and "reasoning_content" not in message


def test_stops_and_special_tokens(http):
    plain = content(http, stop=["dog"])
    assert content(http, stop=["dog"], include_stop_str_in_output=True) == plain + "dog"
    whole = content(http, max_tokens=8)
    spoken = good(http, "/tokenize", prompt=whole, add_special_tokens=False)["tokens"]
    cut = content(http, stop_token_ids=[spoken[3]], include_stop_str_in_output=True)
    assert cut.startswith(content(http, stop_token_ids=[spoken[3]])) and whole.startswith(cut)
    forced = {"logit_bias": {"1": 100.0}, "max_tokens": 2}  # <|im_start|>
    assert content(http, **forced) == ""
    assert content(http, skip_special_tokens=False, **forced) == "<|im_start|>" * 2


def test_truncated(http):
    usage = good(http, CHAT, messages=USER, truncate_prompt_tokens=5, max_tokens=1)["usage"]
    assert usage["prompt_tokens"] == 5
    usage = good(http, TEXT, prompt=[300] * 2000, truncate_prompt_tokens=-1, max_tokens=1)["usage"]
    assert usage["prompt_tokens"] == 1023
    assert refused(http, TEXT, prompt="x", truncate_prompt_tokens=0).startswith("truncate_prompt_tokens")


def test_a_gap_is_filled(tmp_path):
    """What the engine is given, where the tokenizer has the words for it."""
    engine = ScriptedEngine("a fox")
    words = ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>")
    wider = Tokenizer.from_folder(with_added_tokens(tmp_path, words))
    engine.text = TextCodec("nowhere", wider, None)
    with RunningServer(loader=ScriptedEngines(engine)) as running, running.client() as http:
        body = {"prompt": "Once ", "suffix": " ran.", "max_tokens": 8}
        assert good(http, TEXT, **body)["choices"][0]["text"] == "a fox"
        prompt = wider.decode(engine.seen[0].prompt, skip_special_tokens=False)
        assert prompt == "<|fim_prefix|>Once <|fim_suffix|> ran.<|fim_middle|>"
        assert refused(http, TEXT, **body, echo=True).startswith("echo: does not go with suffix")


class TestPromptLogprobs:
    def test_they_are_those_of_decoding(self, http):
        """Equal bits: a text is written with log-probabilities, then read as a prompt."""
        prompt = [300, 301, 302]
        body = {**GREEDY, "prompt": prompt, "max_tokens": 40, "logprobs": 2, "ignore_eos": True}
        (written,) = good(http, TEXT, **body)["choices"]
        tokens = good(http, "/tokenize", prompt=written["text"], add_special_tokens=False)["tokens"]
        for _ in range(2):  # the second time, the prefix is there already
            body = {"prompt": [*prompt, *tokens], "max_tokens": 1, "prompt_logprobs": 2, "temperature": 0}
            answer = good(http, TEXT, **body)
            read = answer["choices"][0]["prompt_logprobs"]
            assert len(read) == len(prompt) + len(tokens) and read[0] is None
            assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
            for token, place, logprob in zip(
                tokens, read[len(prompt) :], written["logprobs"]["token_logprobs"], strict=True
            ):
                told = place[str(token)]
                assert told["logprob"] == logprob and told["rank"] == 1  # greedy
                assert sorted(one["rank"] for one in place.values()) == [1, 2]

    def test_a_long_prompt_in_chunks(self, http):
        """Read alone, beside others and cut anew, the numbers are the same."""
        prompt = [300 + number * 7 % 700 for number in range(300)]
        body = {"prompt": prompt, "max_tokens": 1, "prompt_logprobs": 0}
        alone = good(http, TEXT, **body)["choices"][0]["prompt_logprobs"]
        beside = good(http, TEXT, **body | {"prompt": [prompt, prompt[:90], prompt], "n": 2})["choices"]
        assert [len(one["prompt_logprobs"]) for one in beside] == [300, 300, 90, 90, 300, 300]
        assert all(one["prompt_logprobs"] == alone[: len(one["prompt_logprobs"])] for one in beside)

    def test_echo(self, http, tokenizer):
        """As lm-evaluation-harness asks for it."""
        body = {"prompt": "Once upon a time", "echo": True, "logprobs": 1, "max_tokens": 1, "temperature": 0}
        (one,) = good(http, TEXT, **body)["choices"]
        told, tokens = one["logprobs"], tokenizer.encode("Once upon a time")
        assert "".join(told["tokens"]) == one["text"] and len(told["tokens"]) == len(tokens) + 1
        assert told["token_logprobs"][0] is None and all(value <= 0 for value in told["token_logprobs"][1:])
        assert told["text_offset"][-1] == len("Once upon a time")

    def test_chat_has_them_beside_its_choices(self, http):
        answer = good(http, CHAT, messages=USER, max_tokens=1, prompt_logprobs=1)
        assert len(answer["prompt_logprobs"]) == answer["usage"]["prompt_tokens"]

    def test_not_for_streams(self, http):
        for path, body in ((CHAT, {"messages": USER}), (TEXT, {"prompt": "x"})):
            told = refused(http, path, **body, prompt_logprobs=1, stream=True)
            assert told.startswith("prompt_logprobs") and "stream" in told

    def test_not_without_end(self, http):
        body = {"prompt": [[300] * 900] * 20, "n": 2, "max_tokens": 1}
        assert refused(http, TEXT, **body, prompt_logprobs=20).startswith("prompt_logprobs: 756000 numbers")


class TestTokens:
    def test_vllm(self, http, tokenizer):
        told = good(http, "/tokenize", prompt="Once upon é", return_token_strs=True)
        assert told["tokens"] == tokenizer.encode("Once upon é") and told["count"] == len(told["tokens"])
        assert "".join(told["token_strs"]) == "Once upon é" and told["max_model_len"] == 1024
        assert good(http, "/detokenize", tokens=told["tokens"])["prompt"] == "Once upon é"
        assert refused(http, "/tokenize", prompt="x", content="y").startswith("content: send exactly one")

    def test_llama_cpp(self, http, tokenizer):
        tokens = tokenizer.encode("Once 💥", add_special_tokens=False)
        assert good(http, "/tokenize", content="Once 💥") == {"tokens": tokens}
        pieces = good(http, "/tokenize", content="Once 💥", with_pieces=True)["tokens"]
        assert [one["id"] for one in pieces] == tokens
        spelled = [p if isinstance(p := one["piece"], list) else list(p.encode()) for one in pieces]
        assert b"".join(map(bytes, spelled)).decode() == "Once 💥"
        assert good(http, "/detokenize", tokens=tokens)["content"] == "Once 💥"
        assert refused(http, "/detokenize", tokens=[10**9]).startswith("tokens[0]")


def test_props_and_slots(http):
    told = http.get("/props").json()
    assert told["total_slots"] == len(http.get("/slots").json()) and "message" in told["chat_template"]
    assert told["default_generation_settings"]["n_ctx"] == 1024 and told["model_alias"] == "tale-20m"


class TestEmbeddings:
    def test_openai_package(self, running):
        client = openai.OpenAI(base_url=f"{running.url}/v1", api_key="none", max_retries=0)
        texts = ["A dog barked.", "A dog barked at me.", "Interest rates rose."]
        told = client.embeddings.create(model="gpt-4o", input=texts)  # base64, as the package asks
        floats = client.embeddings.create(model="gpt-4o", input=texts, encoding_format="float")
        assert [one.embedding for one in told.data] == [one.embedding for one in floats.data]
        vectors = [one.embedding for one in floats.data]
        assert all(abs(sum(x * x for x in vector) - 1) < 1e-5 for vector in vectors)

        def alike(a, b):
            return sum(x * y for x, y in zip(a, b, strict=True))

        assert alike(vectors[0], vectors[1]) > alike(vectors[0], vectors[2])
        assert told.usage.prompt_tokens == told.usage.total_tokens > 3
        short = client.embeddings.create(model="gpt-4o", input=texts[0], dimensions=16).data[0].embedding
        scale = vectors[0][0] / short[0]
        assert all(abs(a - b * scale) < 1e-5 for a, b in zip(vectors[0][:16], short, strict=True))

    def test_a_vector_does_not_depend_on_others(self, http):
        texts = [f"Story number {number} " + "is told. " * number for number in range(24)]
        beside = good(http, "/v1/embeddings", input=texts, encoding_format="base64")["data"]
        for number in (0, 7, 23):
            alone = good(http, "/v1/embeddings", input=texts[number], encoding_format="base64")["data"][0]
            assert alone["embedding"] == beside[number]["embedding"]

    def test_what_it_refuses(self, http):
        assert refused(http, "/v1/embeddings", input=["x", ""]).startswith("input[1]: is empty")
        assert refused(http, "/v1/embeddings", input="x", dimensions=1000).startswith(
            "dimensions: 1000 is more"
        )
        assert refused(http, "/v1/embeddings", messages=USER, input="x").startswith("messages: send texts")
        assert "context" in refused(http, "/v1/embeddings", input=[5] * 5000)

    @pytest.mark.parametrize("pooling", ["mean", "last"])
    def test_against_transformers(self, http, tokenizer, pooling):
        torch = pytest.importorskip("torch")
        transformers = pytest.importorskip("transformers")
        model = transformers.AutoModel.from_pretrained(EMBEDDED, dtype=torch.float32)
        tokens = tokenizer.encode("Once upon a time there was a dog who could sing.")
        with torch.inference_mode():
            hidden = model(torch.tensor([tokens])).last_hidden_state[0].double()
        wanted = hidden[-1] if pooling == "last" else hidden.mean(0)
        told = good(http, "/v1/embeddings", input=tokens, pooling=pooling, encoding_format="base64")
        packed = base64.b64decode(told["data"][0]["embedding"])
        found = torch.tensor(struct.unpack(f"<{len(packed) // 4}f", packed), dtype=torch.double)
        assert torch.cosine_similarity(found, wanted, dim=0) > 1 - 3e-5  # served in bfloat16


class TestNames:
    def test_aliases(self, http):
        listed = [one["id"] for one in http.get("/v1/models").json()["data"]]
        assert listed == ["tale-20m", "gpt-4o"]
        assert http.get("/v1/model/list").json()["data"][1]["root"] == "tale-20m"
        assert good(http, CHAT, model="gpt-4o", messages=USER, max_tokens=1)["model"] == "gpt-4o"
        for name in ("o3", "gpt-5"):
            answer = http.post(CHAT, json={"model": name, "messages": USER})
            assert answer.status_code == 404 and "gpt-4o" in answer.text

    def test_permission(self, http):
        assert http.get("/v1/auth/permission").json() == {"permission": "admin"}
        assert http.get("/ping").status_code == 200
