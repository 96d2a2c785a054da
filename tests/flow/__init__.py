"""The whole path in memory: client, router, pools, token stream."""

import pytest

# What checks for several test modules says as much of a failure as they do.
pytest.register_assert_rewrite("tests.flow.asked", "tests.flow.cancelled", "tests.flow.continued")
