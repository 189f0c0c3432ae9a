"""What every test shares: the `--all` option, the machine's limits, and tables at the end."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import pytest
from gpu_marker import add_option, skip_without_gpus

from piper_owner.runtime import environment

if TYPE_CHECKING:
    from ranks import RankPool

TABLES = pytest.StashKey[dict[str, Callable[[], str]]]()


def pytest_configure() -> None:
    # Before any test module imports ray, which reads its settings only then.
    environment.prepare(None)
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        # A shell that starts the tests in the background has Ctrl+C ignored, in every process below.
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--all", action="store_true", default=False, help="run the tests marked slow as well")
    add_option(parser)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not config.getoption("--all"):
        skip_slow = pytest.mark.skip(reason="slow: runs with --all")
        for item in items:
            if item.get_closest_marker("slow") is not None:
                item.add_marker(skip_slow)


def pytest_runtest_setup(item: pytest.Item) -> None:
    skip_without_gpus(item)


@pytest.fixture(scope="session")
def show_at_end(pytestconfig: pytest.Config) -> Callable[[str, Callable[[], str]], None]:
    """Call it with a title and what gives a text: that is printed below the results of the tests."""

    def show(title: str, text: Callable[[], str]) -> None:
        pytestconfig.stash.setdefault(TABLES, {})[title] = text

    return show


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    for title, text in config.stash.get(TABLES, {}).items():
        terminalreporter.section(title)
        terminalreporter.write_line(text())


@pytest.fixture(scope="session")
def ray_cluster() -> Iterator[None]:
    """A connected local Ray with four logical CPUs, started once; tests use it as a user's own.

    It has the machine's GPUs, or two that are not there: Ray only counts them."""
    import logging

    import ray
    import torch

    ray.init(
        address="local",
        num_cpus=4,
        num_gpus=torch.cuda.device_count() or 2,
        include_dashboard=False,
        log_to_driver=False,
        configure_logging=False,
        logging_level=logging.ERROR,
    )
    yield
    ray.shutdown()


@pytest.fixture(scope="session")
def rank_pool() -> Iterator[RankPool]:
    """Rank processes that all tests share; they start when they are first needed."""
    from ranks import RankPool  # imports torch, which most tests do without

    pool = RankPool()
    yield pool
    pool.close()
