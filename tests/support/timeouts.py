"""Pytest plugin: the time limit of a test also covers the teardown of its fixtures after a failure.

When a test fails, pytest-timeout stops its timer, so that a debugger can be used. A fixture that
waits for a thread which never ends would then stop the run without a name.
"""

import pytest

_SETTINGS = pytest.StashKey()


@pytest.hookimpl(tryfirst=True)
def pytest_timeout_set_timer(item, settings):
    item.stash[_SETTINGS] = settings


@pytest.hookimpl(wrapper=True)
def pytest_exception_interact(node):
    result = yield
    if _SETTINGS in node.stash:
        node.config.hook.pytest_timeout_set_timer(item=node, settings=node.stash[_SETTINGS])
    return result
