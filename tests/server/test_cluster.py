"""Replicas on a Ray instance of this machine that come and go with the load."""

from __future__ import annotations

import asyncio
import dataclasses
import importlib.util
import sys
from pathlib import Path

import pytest

from bros.core.clock import SystemClock
from bros.core.config import Config, ServerConfig
from bros.core.errors import ConfigError
from bros.core.request import ServiceClass, Slo
from bros.router.elastic import ElasticReplicas, ElasticSettings
from bros.router.replica_set import ReplicaState
from bros.server.replicas import (
    ClusterReplicas,
    connect_cluster,
    describe_replicas,
    replica_bounds,
)
from support.process_engine import TINY_ENGINE, ask, tokens_of
from support.ray_cluster import connected
from support.tiny_models import save_tiny_llama

WAIT_S = 120.0


async def until_up(replicas: ElasticReplicas, number: int) -> None:
    async with asyncio.timeout(WAIT_S):
        while [status.state for status in replicas.replicas()].count(ReplicaState.UP) != number:
            await asyncio.sleep(0.1)


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.multiprocess
async def test_deadlines_bring_an_actor_and_calm_takes_it_away(
    ray_address: str, tmp_path: Path
) -> None:
    save_tiny_llama(tmp_path / "tiny")
    engine = dataclasses.replace(TINY_ENGINE, model=str(tmp_path / "tiny"))
    config = Config(engine=engine, server=ServerConfig(log_level="error"))
    settings = ElasticSettings(min_replicas=1, max_replicas=2, calm_s=2.0)
    with connected(ray_address) as cluster:
        replicas = ClusterReplicas(config, cluster, pytest.fail, settings)
        await replicas.start()
        try:
            await until_up(replicas, 1)
            expected = await tokens_of(replicas, ask("first", 100))
            now = SystemClock().now()
            requests = [
                dataclasses.replace(
                    ask(f"be{n}", 100),
                    service_class=ServiceClass.BE,
                    slo=Slo(deadline_s=1.0),
                    arrival_s=now,
                )
                for n in range(200)
            ]
            answers = [asyncio.create_task(tokens_of(replicas, each)) for each in requests]
            # More than one actor can do, however long another one takes to start.
            replicas.set_backlog(lambda: [(1_000_000, 60.0)])
            await until_up(replicas, 2)
            replicas.set_backlog(tuple)
            assert await asyncio.gather(*answers) == [expected] * len(requests)
            await until_up(replicas, 1)
            assert await tokens_of(replicas, ask("last", 100)) == expected
            assert all(status.lost == 0 for status in replicas.replicas())
        finally:
            await replicas.close()


@pytest.mark.parametrize(
    ("options", "bounds", "words"),
    [
        ({"replicas": 3}, (3, 3), "3 replicas"),
        ({"replicas": 2, "max_replicas": 5}, (2, 5), "2 to 5 replicas"),
        ({"replicas": 2, "min_replicas": 1}, (1, 2), "1 to 2 replicas"),
        ({"replicas": 2, "cluster": "auto"}, (2, 2), "2 replicas on a Ray cluster"),
    ],
)
def test_bounds(options: dict[str, object], bounds: tuple[int, int], words: str) -> None:
    config = ServerConfig(**options)
    assert replica_bounds(config) == bounds
    assert describe_replicas(config) == words


@pytest.mark.parametrize(
    ("options", "flag"),
    [
        ({"replicas": 2, "min_replicas": 3, "max_replicas": 4}, "--min-replicas"),
        ({"replicas": 5, "max_replicas": 4}, "--max-replicas"),
        (
            {"min_replicas": 2, "max_replicas": 1},
            "--min-replicas: 2 is more than --max-replicas 1",
        ),
    ],
)
def test_bounds_are_around_the_first_number(options: dict[str, object], flag: str) -> None:
    with pytest.raises(ConfigError, match=flag):
        replica_bounds(ServerConfig(**options))


def test_without_ray_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"bros\[ray\]"):
        connect_cluster("auto")


@pytest.mark.parametrize("address", ["foo", "", "ray://10.0.0.1:10001", "host:port", "a b:1"])
def test_an_address_is_auto_or_host_and_port(address: str) -> None:
    with pytest.raises(ConfigError, match="--cluster: .* is neither auto nor host:port"):
        ServerConfig(cluster=address)
    for good in ("auto", "10.0.0.1:6379", "head.local:6379", "[::1]:6379"):
        assert ServerConfig(cluster=good).cluster == good


def test_a_ray_that_is_broken_says_how(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    monkeypatch.setitem(sys.modules, "bros.transport.ray", None)
    with pytest.raises(ConfigError, match="cannot be loaded"):
        connect_cluster("auto")
