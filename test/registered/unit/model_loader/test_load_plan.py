"""The plan: which route each tensor takes, decided from headers alone."""

import unittest
from pathlib import Path

import pytest
from small_loads import SmallLoads, tensors_of

from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=12, suite="base-a-test-cpu")


class TestLoadPlan(SmallLoads):
    def plan(self, *stems, **choices):
        files = [str(Path(self.folder, f"{stem}.safetensors")) for stem in stems]
        headers = self.core("header").read_headers(files)
        return self.core("plan").make_plan(headers, **choices)

    def routes(self, *stems, **choices):
        entries = self.plan(*stems, **choices).entries
        return [(entry.tensor.name, entry.route.value) for entry in entries]

    @pytest.mark.feature
    def test_routes_are_skip_host_read_stream(self):
        # Turns red when the order of the routes changes.
        self.write(a=tensors_of("h.x", "no", "yyy"), b=tensors_of("zzzz"))
        found = self.routes(
            "a",
            "b",
            host_resident_weight_patterns=("h.",),
            wanted_weight=lambda name: name != "no",
        )
        self.assertEqual(
            sorted(found),
            [("h.x", "host"), ("no", "skip"), ("yyy", "read"), ("zzzz", "stream")],
        )

    @pytest.mark.feature
    def test_index_says_which_of_two_copies_counts(self):
        # Turns red when a stale copy wins, or two copies pass without an index.
        self.write(a=tensors_of("x"), b=tensors_of("x", "yy"))
        index = {"x": str(Path(self.folder, "b.safetensors"))}
        found = self.routes("a", "b", weight_map=index)
        self.assertEqual(found[0], ("x", "skip"))
        with self.assertRaisesRegex(ValueError, "no index says which one counts"):
            self.plan("a", "b")


if __name__ == "__main__":
    unittest.main()
