"""A load that several tenants share: whose requests are whose, and what each one gets."""

from __future__ import annotations

import io
from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from bros.bench.client import Client, Outcome, Record
from bros.bench.dialects import RequestFormat, dialect_of
from bros.bench.metrics import Window, measure, measure_tenants
from bros.bench.plan import BenchTenants
from bros.bench.report.files import page
from bros.bench.report.terminal import print_report, tenant_rows
from bros.bench.report.words import name_of
from bros.bench.results import BenchResult
from bros.simulator.virtual_loop import run_virtual
from support.bench_records import BE, RT, SLO, make_record, typical_bench
from support.bench_server import FakeHttp, Script, answer, planned, render

TENANTS = BenchTenants({"ann": 3.0, "bob": 1.0}, {"ann": "ann-key", "bob": "bob-key"})
WINDOW = Window(0.0, 100.0)


def records(count: int) -> list[Record]:
    return [
        make_record(
            RT if number % 2 else BE,
            name=f"r{number}",
            due_s=number / 10,
            gaps_s=[0.1, 0.2],
            outcome=Outcome.COMPLETED,
        )
        for number in range(count)
    ]


def test_each_tenant_has_its_share_of_the_requests() -> None:
    found = Counter(TENANTS.tenant_of(planned(name=f"rt-{n}")) for n in range(4000))
    assert found["ann"] / 4000 == pytest.approx(0.75, abs=0.03)


@given(st.text(), st.dictionaries(st.text(max_size=4), st.floats(0.001, 1000.0), min_size=1))
def test_a_request_is_always_of_the_same_tenant(name: str, shares: dict[str, float]) -> None:
    tenants = BenchTenants(shares, {})
    found = tenants.tenant_of(planned(name=name))
    assert found in shares
    assert tenants.tenant_of(replace(planned(name=name), output_tokens=99)) == found


def test_requests_are_sent_with_the_key_of_their_tenant() -> None:
    http = FakeHttp(lambda _: Script(pieces=[(0.0, piece) for piece in answer(2)]))
    request_format = RequestFormat(dialect=dialect_of("bros"), model="m")
    client = Client(http, "http://x", request_format, render, api_key="other", tenants=TENANTS)

    async def main() -> None:
        for number in range(20):
            record = Record(planned=planned(name=f"r{number}"), due_s=0.0)
            await client.send(record, client.prepare(record.planned), lambda: 0.0)

    run_virtual(main)
    keys = [seen.headers["authorization"] for seen in http.seen]
    assert keys == [f"Bearer {TENANTS.tenant_of(planned(name=f'r{n}'))}-key" for n in range(20)]


def test_figures_of_tenants_add_up_to_those_of_the_run() -> None:
    found = records(300)
    tenants = measure_tenants(found, SLO, WINDOW, TENANTS)
    whole = measure(found, SLO, WINDOW).by_class
    assert [(each.name, each.share) for each in tenants] == [("ann", 0.75), ("bob", 0.25)]
    assert sum(each.requests for each in tenants) == whole[RT].requests == 150
    assert sum(each.ttft_s.count for each in tenants) == whole[RT].ttft_s.count
    for name, part in (("rt_tokens_per_s", whole[RT]), ("be_tokens_per_s", whole[BE])):
        total = sum(getattr(each, name) for each in tenants)
        assert total == pytest.approx(part.tokens_per_s)


def test_the_report_says_what_each_tenant_got() -> None:
    bench = typical_bench((0.3,))
    tenants = measure_tenants(records(300), SLO, WINDOW, TENANTS)
    bench = replace(bench, results=tuple(replace(r, tenants=tenants) for r in bench.results))
    assert BenchResult.from_json(bench.to_json()) == bench
    text = io.StringIO()
    print_report(Console(file=text, width=120), bench)
    lines = [line.split() for line in text.getvalue().splitlines() if "ann" in line.split()]
    assert len(lines) == len(bench.results)
    assert all("75" in line for line in lines)
    html = page(bench)
    for run, (tenant, *figures) in tenant_rows(bench):
        cells = "".join(f"<td>{text}</td>" for text in (tenant, *figures))
        assert f'<th scope="row">{name_of(bench, run)}</th>{cells}' in html
