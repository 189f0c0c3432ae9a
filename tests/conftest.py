"""What every test shares: the `--all` option, the machine's limits, and tables at the end."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import pytest

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


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not config.getoption("--all"):
        skip_slow = pytest.mark.skip(reason="slow: runs with --all")
        for item in items:
            if item.get_closest_marker("slow") is not None:
                item.add_marker(skip_slow)


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu") is not None:
        import torch

        if not torch.cuda.is_available():
            pytest.skip("needs an accelerator")


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
    """A connected local Ray with four logical CPUs and two logical GPUs, started once; tests use it as a
    user's own. Ray only counts GPUs: they need not be there until somebody uses one."""
    import logging

    import ray

    ray.init(
        address="local",
        num_cpus=4,
        num_gpus=2,
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
