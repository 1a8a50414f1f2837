"""Settings: what each source may say, who wins, and what is said of a mistake."""

import dataclasses
import os
import re
from pathlib import Path

import pytest

from headlong.cli import settings_table
from headlong.config import ENGINE_OPTIONS, EngineConfig
from headlong.errors import ConfigError
from headlong.server import config_file, keys
from headlong.server.models import LoadBody, LoadRequest
from headlong.server.settings import OPTIONS, Settings
from headlong.server.settings_sources import load, suspicious_variables

DOCS = Path(__file__).parents[2] / "docs" / "server.md"
KEY = "a-perfectly-good-key"
HASH = keys.hash_key(KEY)


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in os.environ:
        if name.startswith("HEADLONG_"):
            monkeypatch.delenv(name)


@pytest.fixture
def from_yaml(tmp_path: Path):
    """Settings of a config.yml with this text."""

    def read(text: str | bytes, **flags) -> Settings:
        path = tmp_path / "config.yml"
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        return load(flags, str(path))

    return read


def test_defaults_are_safe():
    settings = load({})
    assert settings == Settings()
    assert settings.host == "127.0.0.1" and settings.cors_origins == () and not settings.log_prompts
    assert not settings.inline_loading and settings.api_keys == ()
    assert settings.engine_with({}) == {}, "the engine's defaults stay the engine's"


def test_engine_fields_are_those_of_the_engine():
    no_options = {"map_files"}  # the server decides
    names = [field.name for field in dataclasses.fields(EngineConfig) if field.name not in no_options]
    assert [name for name, option in OPTIONS.items() if option.group == "engine"] == names
    load_fields = set(LoadRequest.model_fields) - set(LoadBody.model_fields)
    local = {"generation_config", "chat_template"}
    assert load_fields == set(names) - local, "a load request takes all that name no file of the server's"


def test_precedence(from_yaml, monkeypatch):
    text = "port: 1\nmax_queue: 1\nmax_rows: 1\n"
    monkeypatch.setenv("HEADLONG_PORT", "2")
    monkeypatch.setenv("HEADLONG_MAX_QUEUE", "2")
    settings = from_yaml(text, port="3")
    assert (settings.port, settings.max_queue, settings.engine_options["max_rows"]) == (3, 2, 1)
    assert settings.max_models == 1


def test_the_file_is_named_by_flag_or_environment_and_never_guessed(tmp_path, monkeypatch):
    for number, name in enumerate(("config.yml", "other.yml"), 1):
        (tmp_path / name).write_text(f"port: {number}\n")
    monkeypatch.chdir(tmp_path)
    assert load({}).port == Settings.port
    monkeypatch.setenv("HEADLONG_CONFIG", "config.yml")
    assert load({}).port == 1
    assert load({}, "other.yml").port == 2


SAMPLES = {
    "text": ("some text", "some text"),
    "whole": ("2048", 2048),
    "number": ("0.75", 0.75),
    "switch": ("true", True),
    "depth": ("auto", "auto"),
    "tokens": ("4096", 4096),
    "keys": (HASH, (HASH,)),
    "sampling": ('{"temperature": 0.5}', {"temperature": 0.5}),
}
SPECIAL = {
    "key_limits": ("{}", {}),  # of keys that there are
    "cors_origins": (
        "https://a.example,http://b.example:8080",
        ("https://a.example", "http://b.example:8080"),
    ),
    "served_names": ("one, two", ("one", "two")),
    "aliases": ("a=one, b = two", ("a=one", "b = two")),
    "dtype": ("float32", "float32"),
    "draft_dtype": ("float32", "float32"),
    "max_models": ("3", 3),
    "page_size": ("64", 64),
    "max_draft_tokens": ("6", 6),
}


def value_of(settings: Settings, name: str) -> object:
    """Of the server's own settings or the engine's."""
    return settings.engine_options[name] if name in ENGINE_OPTIONS else getattr(settings, name)


def sample(name: str) -> tuple[str, object]:
    option = OPTIONS[name]
    if option.type == "choice":
        return option.choices[-1], option.choices[-1]
    return SPECIAL[name] if name in SPECIAL else SAMPLES[option.type]


@pytest.mark.parametrize("name", OPTIONS)
def test_every_field_from_every_source(name, from_yaml, monkeypatch):
    text, value = sample(name)
    assert value_of(load({name: text}), name) == value
    as_yaml = list(value) if isinstance(value, tuple) else value
    assert value_of(from_yaml(f"{name}: {as_yaml!r}\n".replace("True", "true")), name) == value
    monkeypatch.setenv(f"HEADLONG_{name.upper()}", text)
    assert value_of(load({}), name) == value


@pytest.mark.parametrize(
    ("name", "wrong", "complaint"),
    [
        ("port", "eighty", "must be a whole number, not 'eighty'"),
        ("port", "65536", "must be a whole number from 0 to 65535, not 65536"),
        ("port", "-1", "must be a whole number from 0 to 65535"),
        ("header_timeout", "nan", "must be a number from"),
        ("header_timeout", "inf", "must be a number from"),
        ("header_timeout", "soon", "must be a number, not 'soon'"),
        ("max_queue", "0", "must be a whole number from 1"),
        ("page", "maybe", "must be true or false"),
        ("mtp", "maybe", "must be one of auto, on, off"),
        ("log_level", "loud", "must be one of debug, info"),
        ("draft_tokens", "some", "must be a whole number or auto"),
        ("max_rows", "0", "max_rows must be a whole number from 1 to 4096, not 0"),
        (
            "gpu_memory_fraction",
            "0",
            "gpu_memory_fraction must be a number above 0 and at most 1, such as 0.9",
        ),
        ("gpu_memory_fraction", "1.5", "must be a number from 0 to 1"),
        ("draft_tokens", "99", "draft_tokens must be a whole number from 0 to 16"),
        ("dtype", "int4", "dtype must be 'auto' or one of"),
        ("cors_origins", "example.org", "must hold origins such as https://example.org"),
        ("served_names", "a,,b", "must hold printable names"),
        ("sampling", "hot", "must be a JSON object"),
        ("sampling", "[1]", "must map temperature"),
        ("sampling", '{"heat": 1}', "has no 'heat'; it may hold temperature"),
        ("sampling", '{"temperature": -1}', "temperature must be at least 0"),
        ("sampling", "[" * 100_000, "must be a JSON object"),
        ("speculative_config", '{"method": "eagle"}', "method must be mtp"),
        ("speculative_config", '{"model": "x"}', "there is no 'model'"),
        ("speculative_config", '{"num_speculative_tokens": "3"}', "must be a whole number, not '3'"),
        ("speculative_config", "3", "must be a mapping with method and num_speculative_tokens"),
    ],
)
def test_wrong_values_name_their_place(name, wrong, complaint, monkeypatch):
    with pytest.raises(ConfigError, match=re.escape(complaint)) as flag:
        load({name: wrong})
    assert str(flag.value).startswith(f"--{name.replace('_', '-')}")
    monkeypatch.setenv(f"HEADLONG_{name.upper()}", wrong)
    with pytest.raises(ConfigError, match=re.escape(complaint)) as variable:
        load({})
    assert str(variable.value).startswith(f"environment variable HEADLONG_{name.upper()}")


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("prot: 8000", "there is no 'prot'; did you mean port?"),
        ("API-keys: []", "there is no 'API-keys'; did you mean api_keys?"),
        ("1: 2", "there is no '1'"),
        ("port: '8000'", ": port must be a whole number from 0 to 65535, not '8000'"),
        ("port: true", ": port must be a whole number"),
        ("host: 1", ": host must be a text"),
        ("page: 'yes'", ": page must be true or false"),
        ("max_queue: 1\nport: 1\nmax_queue: 2", "line 3: the key 'max_queue' occurs twice"),
        ("network: {host: a, host: b}", "line 1: the key 'host' occurs twice"),
        ("network: {hots: a}", "network: there is no 'hots'; did you mean host?"),
        ("model: {model_name: 3}", "model.model_name must be a text"),
        ("draft_model: {draft_mode: eagle3}", "draft_model: draft_mode must be mtp"),
        ("draft_model: 3", "draft_model must be a mapping"),
        ("draft_tokens: 2\nspeculative_config: {num_speculative_tokens: 3}", "contradicts"),
        ("mtp: off\ndraft_model: {draft_mode: mtp}", "contradicts"),
        ("port: 1\nnetwork: {port: 2}", "network.port contradicts"),
        ("max_rows: 0", "max_rows must be a whole number from 1"),
        ("- a", "must hold `name: value` lines, not a list"),
        ("a: [", "line 1"),
        ("a: &x 1\nport: *x", "aliases are not supported"),
        ("host: !!python/object/apply:os.system ['true']", "line 1"),
        ("? [a, b]\n: 1", "line 1"),
        ("? {a: b}\n: 1", "line 1"),
        ("a: 2001-99-99", "ValueError"),
        ("[" * 5000, "RecursionError"),
        (b"host: \xff\xfe", "not UTF-8 at byte 6"),
        (b"host: a\x00b", "not valid YAML"),
        ("x" * (config_file.MAX_BYTES + 1), "this is no settings file"),
        ("api_keys:", "api_keys is empty; list hashes"),
        ("sampling: {temperature: hot}", "sampling: temperature must be"),
    ],
)
def test_mistakes_in_the_file_name_it(from_yaml, text, complaint):
    with pytest.raises(ConfigError) as error:
        from_yaml(text)
    assert complaint in str(error.value) and "config.yml" in str(error.value)
    assert "\n" not in str(error.value)


def test_a_file_that_is_not_there(tmp_path):
    with pytest.raises(ConfigError, match=r"cannot be read .*; check --config"):
        load({}, str(tmp_path / "config.yml"))
    with pytest.raises(ConfigError, match="cannot be read"):
        load({}, str(tmp_path))


def test_empty_files_and_empty_values(from_yaml):
    assert from_yaml("") == from_yaml("# nothing\n") == from_yaml("model:\nmax_context:\n") == Settings()


@pytest.mark.parametrize(("text", "wanted"), [("on", "on"), ("off", "off"), ("true", "on"), ("auto", "auto")])
def test_yaml_reads_on_and_off_as_booleans(from_yaml, text, wanted):
    assert value_of(from_yaml(f"mtp: {text}"), "mtp") == wanted


TABBY = """
network: {host: 0.0.0.0, port: 5000}
model: {model_name: tale, model_dir: models, inline_model_loading: true, max_seq_len: 2048}
draft_model: {draft_mode: mtp, draft_num_tokens: 4}
"""


def test_tabby_sections(from_yaml):
    settings = from_yaml(TABBY)
    assert (settings.host, settings.port) == ("0.0.0.0", 5000)
    assert (settings.model, settings.model_dir, settings.inline_loading) == ("tale", "models", True)
    assert settings.engine_options == {"max_context": 2048, "mtp": "on", "draft_tokens": 4}


@pytest.mark.parametrize("method", ["mtp", "qwen3_next_mtp"])
def test_vllm_speculative_config(from_yaml, method):
    text = f'{{"method": "{method}", "num_speculative_tokens": 5}}'
    for settings in (load({"speculative_config": text}), from_yaml(f"speculative_config: {text}")):
        assert settings.engine_options == {"mtp": "on", "draft_tokens": 5}
    with pytest.raises(ConfigError, match="contradicts"):
        load({"speculative_config": text, "draft_tokens": "4"})
    assert value_of(from_yaml(f"speculative_config: {text}", draft_tokens="4"), "draft_tokens") == 4, (
        "a flag wins over a file"
    )


def test_deep_drafts_get_room():
    settings = load({"draft_tokens": "12"})
    assert settings.engine_with({}) == {"draft_tokens": 12, "max_draft_tokens": 12}
    assert settings.engine_with({"draft_tokens": 2})["max_draft_tokens"] == 8
    with pytest.raises(ConfigError, match="draft_tokens must be a whole number from 0 to 4"):
        load({"draft_tokens": "5", "max_draft_tokens": "4"})


def test_keys_are_hashed_at_once(monkeypatch, from_yaml):
    assert load({"api_keys": [KEY]}).api_keys == (HASH,)
    assert load({"api_keys": [f"{KEY},other-good-key", HASH.upper().replace("SHA", "sha")]}).api_keys == (
        HASH,
        keys.hash_key("other-good-key"),
    )
    assert from_yaml(f"admin_keys: ['{HASH}']").admin_keys == (HASH,)
    monkeypatch.setenv("HEADLONG_API_KEY", KEY)
    monkeypatch.setenv("HEADLONG_ADMIN_KEY", KEY)
    settings = load({})
    assert settings.api_keys == settings.admin_keys == (HASH,)
    assert KEY not in repr(settings)


@pytest.mark.parametrize("bad", ["short", "has a space in it", "schlüssel-schlüssel", "x" * 600, "sha256:00"])
def test_bad_keys_are_refused_without_being_repeated(bad, monkeypatch, from_yaml):
    monkeypatch.setenv("HEADLONG_API_KEY", bad)
    for attempt in (
        lambda: load({}),
        lambda: load({"admin_keys": [bad]}),
        lambda: from_yaml(f"api_keys: [{bad!r}]"),
        lambda: from_yaml(f"api_keys: {bad!r}"),
    ):
        with pytest.raises(ConfigError, match="headlong keys") as error:
            attempt()
        assert bad not in str(error.value)


def test_a_plain_key_in_the_file_is_refused_with_the_way_to_hash_it(from_yaml):
    with pytest.raises(
        ConfigError, match=r"api_keys\[0\] must be sha256: .* `headlong keys --stdin` hashes"
    ) as error:
        from_yaml(f"api_keys: ['{KEY}']")
    assert KEY not in str(error.value)


def test_an_empty_variable_is_no_silence(monkeypatch):
    monkeypatch.setenv("HEADLONG_API_KEY", "")
    with pytest.raises(ConfigError, match="HEADLONG_API_KEY is empty"):
        load({})


def test_unknown_variables_are_told(monkeypatch):
    monkeypatch.setenv("HEADLONG_NATIVE", "1")
    monkeypatch.setenv("HEADLONG_PORT", "1")
    assert suspicious_variables() == []
    monkeypatch.setenv("HEADLONG_PROT", "1")
    assert load({}).port == 1
    assert suspicious_variables() == [
        "environment variable HEADLONG_PROT has no meaning: there is no 'HEADLONG_PROT'; did you mean HEADLONG_PORT?"
    ]


def test_settings_check_themselves():
    for wrong in ({"port": "8000"}, {"host": ""}, {"api_keys": (KEY,)}, {"max_queue": None}, {"page": 1}):
        with pytest.raises(ConfigError):
            Settings(**wrong)


def test_the_table_in_the_docs_is_the_code_s():
    text = DOCS.read_text(encoding="utf-8")
    table = text.split(settings_table.BEGIN)[1].split(settings_table.END)[0]
    assert table.strip() == settings_table.table().strip(), "run `python -m headlong.cli.settings_table`"


def test_a_draft_vocabulary_is_a_number_or_a_file(from_yaml):
    assert value_of(load({"draft_vocab": "lists/common.json"}), "draft_vocab") == "lists/common.json"
    assert value_of(from_yaml("draft_vocab: common.json\n"), "draft_vocab") == "common.json"
    for wrong in ("-4", "0"):
        with pytest.raises(ConfigError, match="--draft-vocab: draft_vocab must be a whole number"):
            load({"draft_vocab": wrong})
    with pytest.raises(ConfigError, match="draft_vocab must be a whole number or a file"):
        from_yaml("draft_vocab: [1, 2]\n")


def test_aliases(from_yaml):
    """As a mapping in the file, as pairs elsewhere; a target that nobody serves is no error before it is asked for."""
    settings = from_yaml("aliases:\n  gpt-4o: tale-20m\n  claude-sonnet: tale-20m\nany_model: true\n")
    assert settings.model_of_alias == {"gpt-4o": "tale-20m", "claude-sonnet": "tale-20m"}
    assert load({"aliases": ["gpt-4o=a=b"]}).model_of_alias == {"gpt-4o": "a=b"}
    for wrong in ("gpt-4o", "=x", "x=", "a=\x07"):
        with pytest.raises(ConfigError, match="NAME=MODEL"):
            load({"aliases": [wrong]})


def test_any_model():
    from support.scripted import ScriptedEngine, ScriptedEngines
    from support.serving import RunningServer

    engines = ScriptedEngines(ScriptedEngine("A dragon slept."))
    with RunningServer(loader=engines, any_model=True) as running, running.client() as http:
        body = {"model": "whatever", "messages": [{"role": "user", "content": "Hi"}]}
        answer = http.post("/v1/chat/completions", json=body)
        assert answer.status_code == 200 and answer.json()["model"] == "whatever"
        assert http.get("/v1/models/whatever").json()["root"] == "tale-20m"
        assert [one["id"] for one in http.get("/v1/models").json()["data"]] == ["tale-20m"]
        assert http.post("/v1/model/unload").json()["unloaded"] is True
        assert http.post("/v1/chat/completions", json=body).status_code == 404
