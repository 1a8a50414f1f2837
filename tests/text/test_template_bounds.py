"""Templates that ask for gigabytes or hours are cut; conversations that are merely long are not."""

import json
import subprocess
import sys

import pytest
from output_samples import template_text

from headlong.text.template import ChatTemplate

USER = {"role": "user", "content": "x"}


def test_long_conversations():
    """Bounds on time and memory leave room for what people do send."""
    chat = [{"role": "user", "content": "héllo 😀" * 20}, {"role": "assistant", "content": "x" * 100}] * 1500
    for name in ("Qwen3.5-4B", "Qwen3-Coder"):
        assert len(ChatTemplate(template_text(name)).render([*chat, USER])) > 300_000
    assert (
        len(
            ChatTemplate(template_text("Qwen3.5-4B")).render([{"role": "user", "content": "é😀" * 1_000_000}])
        )
        > 2e6
    )


def doubled(start: str, step: str, times: int = 60) -> str:
    return f"{{% set x = {start} %}}{{% set y = {start} %}}" + step * times


LISTS = doubled("[1]", "{% set x = [x, x] %}{% set y = [y, y] %}")
TUPLES = doubled("(1,)", "{% set x = (x, x) %}{% set y = (y, y) %}")
BIG = "{% set x = 'x' * 8000000 %}"
HOSTILE = {
    "center": "{{ 'x'|center(10 ** 9) }}",
    "center while compiling": "{% if 'x'|center(10 ** 9) %}{% endif %}",
    "center block": "{% filter center(10 ** 9) %}x{% endfilter %}",
    "center mapped": "{{ (['x'] * 200000)|map('center', 10 ** 6)|list }}",
    "indent": "{{ 'x'|indent(10 ** 9, true) }}",
    "indent by text": "{{ ('x\n' * 1000000)|indent('y' * 1000000) }}",
    "wordwrap": "{{ ('a ' * 8000)|wordwrap(1, true, 'y' * 4000000) }}",
    "wordwrap slowly": "{{ ('a' * 8000000)|wordwrap(1) }}",
    "percent": "{{ '%1000000000d' % 1 }}",
    "percent star": "{{ '%*d' % (10 ** 9, 1) }}",
    "percent many": "{{ ('%9999d' * 8000) % ((1,) * 8000) }}",
    "percent by name": "{{ ('%(a)s' * 1000000) % {'a': 'x' * 8000000} }}",
    "format filter": "{{ '%1000000000d'|format(1) }}",
    "format": "{{ '{:1000000000}'.format(1) }}",
    "format within": "{{ '{:{}}'.format(1, 10 ** 9) }}",
    "format map": "{{ '{a:1000000000}'.format_map({'a': 1}) }}",
    "format attribute": "{{ ('{:1000000000}'|attr('format'))(1) }}",
    "format many": "{{ ('{0}' * 100000).format('x' * 8000000) }}",
    "join": "{{ ('x' * 8000000).join([''] * 1000) }}",
    "join filter": "{{ ([''] * 200000)|join('y' * 8000000) }}",
    "ljust": "{{ 'x'.ljust(10 ** 9) }}",
    "rjust": "{{ 'x'.rjust(10 ** 9) }}",
    "center method": "{{ 'x'.center(10 ** 9) }}",
    "zfill": "{{ 'x'.zfill(10 ** 9) }}",
    "bytes": "{{ 'x'.encode().ljust(10 ** 9) }}",
    "expandtabs": "{{ '\t'.expandtabs(10 ** 9) }}",
    "translate": "{{ ('a' * 8000000).translate({97: 'x' * 8000000}) }}",
    "replace": "{{ ('x' * 1000000).replace('x', 'y' * 1000000) }}",
    "replace filter": "{{ ('x' * 1000000)|replace('', 'y' * 1000000) }}",
    "list": "{% set ns = namespace(a=[]) %}{% for i in range(9999) %}"
    "{% set ns.a = ns.a + [range(99999)|list] %}{% endfor %}",
    "list of characters": "{{ ('\U0001f600' * 8000000)|list|length }}",
    "split": "{{ ('ab ' * 2600000).split(' ', 10 ** 9)|length }}",
    "splitlines": "{{ ('ab\n' * 2600000).splitlines()|length }}",
    "batch": "{{ [1]|batch(10 ** 9, 0)|list }}",
    "slice": "{{ [1]|slice(10 ** 9)|list }}",
    "slice loop": "{% for a in [1]|slice(10 ** 9) %}{{ loop.length }}{% endfor %}",
    "spread": "{% macro f() %}{% endmacro %}{{ f(*('x' * 8000000)) }}",
    "round": "{{ 1|round(10 ** 9, 'ceil') }}",
    "to_bytes": "{{ (1).to_bytes(10 ** 9, 'big') }}",
    "squares": "{% set x = 3 %}" + "{% set x = x * x %}" * 60 + "{{ x % 7 }}",
    "long number": "{{ ('f' * 8000000)|int(0, 16) }}",
    "sum": "{{ ([range(1000)|list] * 100000)|sum(start=[]) }}",
    "lipsum": "{{ lipsum(1000000) }}",
    "tilde": doubled("'xxxxxxxx'", "{% set x = x ~ x %}"),
    "plus": doubled("'xxxxxxxx'", "{% set x = x + x %}"),
    "list plus": doubled("[1]", "{% set x = x + x %}"),
    "set block": doubled("'xxxxxxxx'", "{% set x %}{{ x }}{{ x }}{% endset %}"),
    "macro": "{% macro d(x) %}{{ x }}{{ x }}{% endmacro %}" + doubled("'xxxxxxxx'", "{% set x = d(x) %}"),
    "many values": "".join(f"{{% set a{i} = '\U0001f600' * 4000000 %}}" for i in range(200)),
    "display in a loop": "{% set ns = namespace(x=0) %}{% for i in range(99999) %}{% set ns.x = [ns.x"
    + ",0" * 5000
    + "] %}{% endfor %}",
    "write shared parts": LISTS + "{{ x }}",
    "string of shared parts": LISTS + "{{ x|string }}",
    "json of shared parts": LISTS + "{{ x|tojson }}",
    "compare shared parts": LISTS + "{{ x == y }}",
    "test shared parts": LISTS + "{{ x is eq y }}",
    "find shared parts": LISTS + "{{ x in [y] }}",
    "index shared parts": LISTS + "{{ [y].index(x) }}",
    "sort shared parts": LISTS + "{{ [x, y]|sort }}",
    "loop.changed": LISTS + "{% for i in [x, y] %}{{ loop.changed(i) }}{% endfor %}",
    "hash shared parts": TUPLES + "{{ {}[x] }}",
    "look up shared parts": TUPLES + "{{ x in {} }}",
    "key of shared parts": TUPLES + "{{ {x: 1} }}",
    "get shared parts": TUPLES + "{{ {}.get(x) }}",
    "dict of shared parts": TUPLES + "{{ dict([(x, 1)]) }}",
    "unique shared parts": TUPLES + "{{ [x, y]|unique|list }}",
    "json indent": "{{ [[[]]]|tojson(indent=10 ** 9) }}",
    "json deep indent": "{% set x = range(99999)|list %}"
    + "{% set x = [x] %}" * 90
    + "{{ x|tojson(indent=9000) }}",
    "json separators": "{{ (range(99999)|list)|tojson(separators=('x' * 1000000, 'y')) }}",
    "search backwards": "{{ ('a' * 4000000).rfind('b' + 'a' * 2000000) }}",
    "strip": "{{ ('a' * 4000000).strip('b' * 4000000 + 'a') }}",
    "trim": "{{ ('a' * 4000000)|trim('b' * 4000000 + 'a') }}",
    "striptags": "{{ (('<!--x-->' * 1000000)|safe).striptags() }}",
    "wordcount": "{{ ('a ' * 4000000)|wordcount }}",
    "slices": "{% set x = '\U0001f600' * 8000000 %}"
    + "".join(f"{{% set a{i} = x[{i}:] %}}" for i in range(200)),
    "compare again and again": BIG
    + "{% set y = 'x' * 8000000 %}{% for i in range(99999) %}{% set z = x == y %}{% endfor %}",
    "search again and again": BIG + "{% for i in range(99999) %}{% set z = 'y' in x %}{% endfor %}",
    "count again and again": BIG + "{% for i in range(99999) %}{% set z = x.count('y') %}{% endfor %}",
    "loops": "{% set l = range(99999)|list %}{% for a in l %}{% for b in l %}{% endfor %}{% endfor %}",
    "loops that skip": "{% set l = range(99999)|list %}{% for a in l %}"
    "{% for b in l if false %}{% endfor %}{% endfor %}",
    "lazy filters": "{% set l = range(99999)|list %}{% for a in l %}{% set x = l|select('none')|first %}{% endfor %}",
    "hook replaced": "{% set headlong_step = namespace %}{% for a in range(99999) %}{% for b in range(99999) %}"
    "{% endfor %}{% endfor %}",
    "date": "{{ strftime_now('%A' * 1000000) }}",
    "long refusal": "{{ raise_exception('x' * 8000000) }}",
    "long source": "{{ x }}" * 10_000,
    "many parts": "{{ [" + "x," * 20_000 + "] }}",
}
MAX_CPU_SECONDS = 5.0
MAX_MORE_MB = 200
HARNESS = """
import json, os, resource, sys, time
from headlong.errors import RequestError
from headlong.text.template import ChatTemplate

def measure(source):
    used = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    pages = int(open("/proc/self/statm").read().split()[0])
    room = pages * os.sysconf("SC_PAGE_SIZE") + (512 << 20)
    resource.setrlimit(resource.RLIMIT_AS, (room, room))
    resource.setrlimit(resource.RLIMIT_CPU, (20, 20))
    start = time.process_time()
    try:
        ChatTemplate(source).render([{"role": "user", "content": "x"}])
        said = "rendered"
    except RequestError as error:
        said = f"RequestError {error}"
    except BaseException as error:
        said = repr(error)
    seconds = time.process_time() - start
    return said[:2000], seconds, (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - used) / 1024

results = {}
for name, source in json.load(sys.stdin).items():
    reader, writer = os.pipe()
    if not os.fork():
        os.write(writer, json.dumps(measure(source)).encode())
        os._exit(0)
    os.close(writer)
    results[name] = json.loads(os.fdopen(reader).read() or '["killed", 0, 0]')
    os.wait()
print(json.dumps(results))
"""


@pytest.fixture(scope="module")
def measured() -> dict[str, tuple[str, float, float]]:
    """Each hostile template in a process of its own, whose memory and time are limited."""
    done = subprocess.run(
        [sys.executable, "-c", HARNESS], input=json.dumps(HOSTILE), capture_output=True, text=True, check=True
    )
    return json.loads(done.stdout)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_templates_are_cut(measured, name):
    said, seconds, more_mb = measured[name]
    assert said.startswith("RequestError ") and "MemoryError" not in said
    assert len(said) < 1000
    assert seconds < MAX_CPU_SECONDS
    assert more_mb < MAX_MORE_MB
