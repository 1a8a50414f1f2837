"""How busy replicas are thought to be."""

from headlong.cluster.loads import MEMORY_SECONDS, Loads


def test_calls_count_until_they_end():
    loads = Loads()
    assert loads.sent("one", "a", 7, now=0.0)
    assert loads.sent("two", "a", 5, now=1.0)
    assert loads.of(["a", "b"], now=1.0) == {"a": 12, "b": 0}
    loads.done("one")
    loads.done("one")
    loads.done("never heard of")
    assert loads.of(["a"], now=1.0) == {"a": 5}


def test_a_call_that_was_refused_counts_where_it_went():
    loads = Loads()
    loads.sent("one", "a", 7, now=0.0)
    assert not loads.sent("one", "a", 7, now=0.5), "asked again, and to the same one"
    assert loads.sent("one", "b", 7, now=1.0)
    assert loads.of("ab", now=1.0) == {"a": 0, "b": 7}


def test_reports_tell_of_others_work():
    loads = Loads()
    loads.sent("one", "a", 100, now=0.0)
    loads.report("a", 60)  # some of it is done: nothing of others
    assert loads.of("a", now=0.0) == {"a": 100}
    loads.report("a", 250)
    assert loads.of("a", now=0.0) == {"a": 250}
    loads.done("one")
    assert loads.of("a", now=0.0) == {"a": 150}, "what others sent is still there"
    loads.report("a", 0)
    assert loads.of("a", now=0.0) == {"a": 0}


def test_a_report_on_its_way_does_not_make_others_of_what_has_ended_meanwhile():
    loads = Loads()
    for call in ("one", "two"):
        loads.sent(call, "a", 100, now=0.0)
    loads.report("a", 200)
    loads.done("one")
    loads.report("a", 200)
    loads.done("two")
    loads.report("a", 100)
    assert loads.of("a", now=0.0) == {"a": 0}
    loads.report("a", 90)
    loads.report("a", 90)
    assert loads.of("a", now=0.0) == {"a": 90}, "it was all of others, after all"


def test_calls_that_never_end_are_forgotten_in_time():
    loads = Loads()
    loads.sent("one", "a", 7, now=0.0)
    loads.sent("two", "a", 9, now=10.0)
    assert loads.of("a", now=MEMORY_SECONDS) == {"a": 16}
    assert loads.of("a", now=MEMORY_SECONDS + 1) == {"a": 9}


def test_the_dead_are_forgotten():
    loads = Loads()
    loads.sent("one", "a", 7, now=0.0)
    loads.report("a", 90)
    loads.forget("a")
    loads.forget("nobody")
    loads.done("one")
    assert loads.of("a", now=0.0) == {"a": 0}
