"""How busy replicas are thought to be between their reports."""

from headlong.cluster.loads import MEMORY_SECONDS, REPORT_SECONDS, Loads


def test_what_was_sent_counts_until_a_report_knows_of_it():
    loads = Loads()
    loads.report("a", 100, now=0.0)
    loads.sent("a", 7, now=1.0)
    loads.sent("a", 5, now=4.0)
    assert loads.of(["a", "b"], now=4.0) == {"a": 112, "b": 0}
    loads.report("a", 50, now=1.1 + REPORT_SECONDS)
    assert loads.of(["a"], now=4.0) == {"a": 55}, "the second may be missing from the report"
    loads.report("a", 60, now=4.1 + REPORT_SECONDS)
    assert loads.of(["a"], now=9.0) == {"a": 60}


def test_without_reports_what_was_sent_is_forgotten_in_time():
    loads = Loads()
    loads.sent("a", 7, now=0.0)
    assert loads.of(["a"], now=MEMORY_SECONDS) == {"a": 7}
    assert loads.of(["a"], now=MEMORY_SECONDS + 1) == {"a": 0}


def test_the_dead_are_forgotten():
    loads = Loads()
    loads.report("a", 9, now=0.0)
    loads.forget("a")
    loads.forget("nobody")
    assert loads.of(["a"], now=0.0) == {"a": 0}
