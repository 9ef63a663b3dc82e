"""Helpers that assert show what they compared, as tests do."""

import pytest

pytest.register_assert_rewrite("unit.keyword_cases", "unit.keyword_cases_added", "unit.small")
