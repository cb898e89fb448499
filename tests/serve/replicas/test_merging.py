"""The page of metrics of all replicas, of those that are there and of those that were."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from foretoken.serve.replicas.merging import MetricsPages


def test_metrics_of_replicas_are_one_page():
    page = (
        "# HELP a_total Of a.\n# TYPE a_total counter\n"
        'a_total{{engine="0",model_name="m, engine=\\"0\\""}} {}\n'
        '# HELP b Of b.\n# TYPE b gauge\nb{{engine="0",model_name="m"}} 1.0\n'
    )
    text = MetricsPages().merged([("x", page.format(1.0)), ("y", page.format(2.0))])
    assert text.count("# HELP a_total") == text.count("# TYPE a_total") == 1
    assert samples(text) == {("a_total", "x"): 1.0, ("a_total", "y"): 2.0, ("b", "x"): 1.0, ("b", "y"): 1.0}
    assert 'engine=\\"0\\"' in text
    assert MetricsPages().merged([]) == ""


def test_samples_without_a_header_or_an_engine_are_kept_and_told_apart():
    page = 'early 4.0\n# a note\n# TYPE b gauge\nb{model_name="m",} 1.0\nother 2.0\n'
    text = MetricsPages().merged([("x", page), ("y", page)])
    assert samples(text) == {(name, one): v for name, v in (("early", 4), ("b", 1), ("other", 2)) for one in "xy"}


def counted(count: float) -> str:
    """A page of a replica that counted so much."""
    registry = CollectorRegistry()
    total = Counter("c", "Of c.", ("engine",), registry=registry).labels("0")
    total.inc(count)
    seconds = Histogram("h", "Of h.", ("engine",), registry=registry, buckets=(1.0,)).labels("0")
    seconds.observe(count)
    Gauge("g", "Of g.", ("engine",), registry=registry).labels("0").set(count)
    return generate_latest(registry).decode()


def test_totals_never_go_down_as_replicas_go():
    pages = MetricsPages(most_gone=1)
    first = samples(pages.merged([("x", counted(5.0))]))
    for _ in range(2):  # twice: what is kept stays as it is
        after = samples(pages.merged([("y", counted(2.0))]))
        assert after["c_total", "x"] == 5.0
        assert after["h_sum", "x"] == 5.0
        assert after["h_count", "x"] == first["h_count", "x"] == 1.0
        assert ("g", "x") not in after
        assert after["c_total", "y"] == 2.0
    back = samples(pages.merged([("x", counted(6.0)), ("y", counted(2.0))]))  # it was only late
    assert (back["c_total", "x"], back["g", "x"]) == (6.0, 6.0)
    nobody = samples(pages.merged([]))
    assert {key: value for key, value in back.items() if key[0] in ("c_total", "h_sum")}.items() <= nobody.items()


def test_those_that_are_gone_for_long_become_one_sum():
    pages, totals = MetricsPages(most_gone=3), []
    for number in range(12):
        found = samples(pages.merged([(f"r{number}", counted(number))]))
        totals.append(sum(value for (name, _), value in found.items() if name == "c_total"))
    assert totals == [sum(range(number + 1)) for number in range(12)]
    assert {engine for _, engine in found} == {"r11", "r10", "r9", "r8", "gone"}
    assert found["h_bucket", "gone"] == 8.0  # of +Inf, the last one


def test_the_higher_of_two_pages_that_overtook_each_other_is_kept():
    pages = MetricsPages()
    for count in (7.0, 4.0):
        pages.merged([("x", counted(count))])
    assert samples(pages.merged([]))["c_total", "x"] == 7.0


def samples(page: str) -> dict[tuple[str, str], float]:
    return {
        (one.name, one.labels["engine"]): one.value
        for family in text_string_to_metric_families(page)
        for one in family.samples
    }
